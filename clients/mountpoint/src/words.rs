//! Errors in an operator's words: one line with the cause, the name or code of the error, and what to do.

use std::error::Error;

use mountpoint_s3_client::error::{ListObjectsError, ObjectClientError};
use mountpoint_s3_client::error_metadata::ProvideErrorMetadata;
use mountpoint_s3_client::{NewClientError, S3RequestError};
use mountpoint_s3_fs::metablock::InodeError;

/// The longest text of a service that is repeated.
const LONGEST: usize = 300;

const NO_CREDENTIALS: &str = "no credentials (AWS_AUTH_SIGNING_NO_CREDENTIALS); the credentials endpoint of the mount did not answer or refused";
const NOT_S3: &str = "check that the endpoint is that of an S3 service";
const SET_REGION: &str = "set the region of the volume or of its backend";

/// Returns the cause of a failed listing and what to do.
pub fn listing(error: &ObjectClientError<ListObjectsError, S3RequestError>) -> String {
    let error = match error {
        ObjectClientError::ServiceError(ListObjectsError::NoSuchBucket) => return refusal("NoSuchBucket", ""),
        ObjectClientError::ServiceError(e) => return e.to_string(),
        ObjectClientError::ClientError(e) => e,
    };
    if let S3RequestError::IncorrectRegion(region, _) = error {
        return format!("the bucket is in region {region}; {SET_REGION}");
    }
    let answer = error.meta();
    if let Some(code) = &answer.error_code {
        return refusal(code, answer.error_message.as_deref().unwrap_or_default());
    }
    match error {
        S3RequestError::NoSigningCredentials => NO_CREDENTIALS.into(),
        S3RequestError::CrtError(e) => connection(&e.to_string()),
        _ => match (answer.http_code, error) {
            (Some(status), _) if status >= 300 => format!("HTTP status {status} without an error code of S3; {NOT_S3}"),
            (_, S3RequestError::ResponseError(result)) => connection(&result.crt_error.to_string()),
            (_, S3RequestError::InternalError(e)) => format!("the answer is not a list of objects ({}); {NOT_S3}", parser(e.as_ref())),
            (_, other) => line(&chain(other)),
        },
    }
}

/// Returns why there can be no client, and what to do.
pub fn client(error: &NewClientError) -> String {
    match error {
        NewClientError::TlsConfigurationError(e) => {
            format!("the CA bundle has no certificates that can be read ({}); it must be a PEM file", name(&e.to_string()))
        }
        NewClientError::CrtError(e) | NewClientError::ProviderFailure(e) => connection(&e.to_string()),
        other => line(&chain(other)),
    }
}

/// Returns why an answer cannot be parsed, without the answer.
fn parser(error: &dyn Error) -> String {
    let text = error.to_string();
    let end = [", xml node = ", " from XML element "].iter().filter_map(|cut| text.find(cut)).min().unwrap_or(text.len());
    line(text[..end].trim_start_matches("XML response was not valid: problem = "))
}

/// Returns why a file is not stored.
pub fn unstored(error: &InodeError) -> String {
    let answer = error.meta().client_error_meta;
    match (error, answer.error_code, answer.http_code) {
        (_, Some(code), _) => line(&format!("{code}: {}", answer.error_message.as_deref().unwrap_or_default())),
        (_, None, Some(status)) => format!("HTTP status {status} without an error code of S3"),
        (InodeError::ClientError { source, .. }, ..) => match format!("{source:#}") {
            text if name(&text) != text => connection(&text),
            text => line(&text),
        },
        (other, ..) => line(&chain(other)),
    }
}

fn refusal(code: &str, message: &str) -> String {
    let (cause, remedy) = match code {
        "AccessDenied" | "AllAccessDisabled" => ("access denied", "allow s3:ListBucket for this bucket and prefix"),
        "InvalidAccessKeyId" => ("unknown access key", "check the credentials, and that the endpoint is that of their service"),
        "SignatureDoesNotMatch" => ("wrong signature", "check the secret key, the region and the endpoint"),
        "RequestTimeTooSkewed" => ("clock skew", "set the clock of this node or that of the service"),
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" => {
            ("expired session", "check why the session was not renewed, and the clock of this node")
        }
        "InvalidToken" => ("invalid session token", "check that the endpoint is that of the session's service"),
        "NoSuchBucket" => ("no such bucket", "create it, or check its name and the endpoint"),
        "PermanentRedirect" | "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException" => {
            ("the bucket is in another region", SET_REGION)
        }
        "SlowDown" | "ServiceUnavailable" | "TooManyRequests" => ("rate limit of the service", "try again later"),
        _ => ("refused by the service", ""),
    };
    let detail = if message.is_empty() { line(code) } else { line(&format!("{code}: {message}")) };
    if remedy.is_empty() { format!("{cause} ({detail})") } else { format!("{cause} ({detail}); {remedy}") }
}

/// Finds the cause by the name that an error of the runtime has, such as AWS_IO_DNS_QUERY_FAILED.
pub fn connection(error: &str) -> String {
    const FIREWALL: &str = "check the address of the endpoint, routes and firewalls";
    const LISTENER: &str = "check the address and port of the endpoint, and that the service runs";
    const SCHEME: &str = "check that the scheme of the endpoint (http or https) is right, and that the service runs";
    const CAUSES: [(&str, &str, &str); 19] = [
        ("AWS_IO_DNS", "host name not resolved", "check the endpoint and the DNS of this node"),
        ("AWS_IO_SOCKET_CONNECTION_REFUSED", "connection refused", LISTENER),
        ("AWS_IO_SOCKET_TIMEOUT", "connection timed out", FIREWALL),
        ("AWS_IO_SOCKET_NO_ROUTE_TO_HOST", "no route to the endpoint", FIREWALL),
        ("AWS_IO_SOCKET_NETWORK_DOWN", "network is down", "check the network of this node"),
        ("AWS_IO_TLS_ERROR_DEFAULT_TRUST_STORE_NOT_FOUND", "no CA certificates on this node", "set the backend's caFile"),
        ("AWS_IO_TLS_NEGOTIATION_TIMEOUT", "no answer to the TLS handshake", LISTENER),
        (
            "AWS_IO_TLS",
            "TLS handshake failed",
            "check that the endpoint speaks TLS, and that its certificate is valid for this name and signed by a CA of the backend's caFile or of this node",
        ),
        ("AWS_ERROR_HTTP_CHANNEL_THROUGHPUT_FAILURE", "no answer in time", LISTENER),
        ("AWS_ERROR_HTTP_RESPONSE_FIRST_BYTE_TIMEOUT", "no answer in time", LISTENER),
        ("AWS_ERROR_S3_REQUEST_TIMEOUT", "no answer in time", LISTENER),
        ("AWS_ERROR_HTTP_CONNECTION_CLOSED", "connection closed by the endpoint", SCHEME),
        ("AWS_IO_SOCKET_CLOSED", "connection closed by the endpoint", SCHEME),
        // Errors of the service, after which the runtime has tried again without success.
        ("AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED", "clock skew", "set the clock of this node or that of the service"),
        ("AWS_ERROR_S3_SLOW_DOWN", "rate limit of the service", "try again later"),
        ("AWS_ERROR_S3_INTERNAL_ERROR", "internal error of the service", "see the logs of the service"),
        ("AWS_ERROR_S3_INVALID_RESPONSE_STATUS", "HTTP error without an error code of S3", SCHEME),
        ("AWS_ERROR_HTTP", "the answer is not HTTP", NOT_S3),
        ("AWS_AUTH_CREDENTIALS", "no credentials", "the credentials endpoint of the mount did not answer or refused"),
    ];
    match CAUSES.iter().find(|(prefix, ..)| name(error).starts_with(prefix)) {
        Some((_, cause, remedy)) => format!("{cause} ({}); {remedy}", name(error)),
        None => line(error),
    }
}

/// Returns the name in the text of an error of the runtime: "CRT error 1059: aws-c-io: AWS_IO_DNS_INVALID_NAME, Host name was invalid".
fn name(error: &str) -> &str {
    error
        .split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_')
        .find(|word| word.starts_with("AWS_"))
        .unwrap_or(error)
}

/// Returns the texts of an error and of those that caused it.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(e) = source {
        text = format!("{text}: {e}");
        source = e.source();
    }
    text
}

/// Returns one line of limited length: a service may answer with anything.
fn line(text: &str) -> String {
    let words: Vec<&str> = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty()).collect();
    let mut line = words.join(" ");
    if let Some((end, _)) = line.char_indices().nth(LONGEST) {
        line.truncate(end);
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_found_by_name() {
        let dns = connection("CRT error 1059: aws-c-io: AWS_IO_DNS_INVALID_NAME, Host name was invalid for dns resolution.");
        assert!(dns.starts_with("host name not resolved (AWS_IO_DNS_INVALID_NAME); "), "{dns}");
        assert!(connection("AWS_IO_SOCKET_CONNECTION_REFUSED, x").contains("refused"));
        assert!(connection("AWS_IO_TLS_ERROR_NEGOTIATION_FAILURE").contains("certificate"));
        assert_eq!(connection("AWS_ERROR_OOM"), "AWS_ERROR_OOM");
    }

    #[test]
    fn refusals_name_the_code_and_what_to_do() {
        assert!(refusal("RequestTimeTooSkewed", "m").starts_with("clock skew (RequestTimeTooSkewed: m); "));
        assert_eq!(refusal("Odd", "m"), "refused by the service (Odd: m)");
        assert_eq!(refusal("Odd", ""), "refused by the service (Odd)");
    }

    #[test]
    fn answers_of_a_service_become_one_short_line() {
        assert_eq!(line("a\n\tb\u{1b}[31m  c"), "a b [31m c");
        assert_eq!(line(&"ü".repeat(400)).chars().count(), LONGEST + 1);
    }
}
