//! Errors in an operator's words.

use mountpoint_s3_client::S3RequestError;
use mountpoint_s3_client::error::{ListObjectsError, ObjectClientError};
use mountpoint_s3_client::error_metadata::ProvideErrorMetadata;

/// Returns one line with the cause of a failed listing and what to do.
pub fn listing(error: &ObjectClientError<ListObjectsError, S3RequestError>) -> String {
    let error = match error {
        ObjectClientError::ServiceError(ListObjectsError::NoSuchBucket) => return "the bucket does not exist".into(),
        ObjectClientError::ServiceError(e) => return e.to_string(),
        ObjectClientError::ClientError(e) => e,
    };
    let answer = error.meta();
    if let Some(code) = &answer.error_code {
        return refusal(code, answer.error_message.as_deref().unwrap_or_default());
    }
    match error {
        S3RequestError::NoSigningCredentials => "no credentials: the endpoint that gives them did not answer or refused".into(),
        S3RequestError::Throttled => "the service asks for fewer requests (503 Slow Down)".into(),
        S3RequestError::IncorrectRegion(region, _) => format!("the bucket is in region {region}: give the volume or its backend that region"),
        S3RequestError::CrtError(e) => connection(&format!("{e:?} {e}")),
        S3RequestError::ResponseError(result) if result.response_status >= 300 => {
            format!("the service answered with HTTP status {}", result.response_status)
        }
        S3RequestError::ResponseError(result) => connection(&format!("{:?} {}", result.crt_error, result.crt_error)),
        other => other.to_string(),
    }
}

fn refusal(code: &str, message: &str) -> String {
    let why = match code {
        "AccessDenied" | "AllAccessDisabled" => "access denied: the credentials may not list this bucket and prefix",
        "InvalidAccessKeyId" => "the service does not know the access key",
        "SignatureDoesNotMatch" => "the secret key is wrong, or region or endpoint are not those of the service",
        "RequestTimeTooSkewed" => "the clock of this node and that of the service differ: set the node's clock",
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" => "the session has expired",
        "InvalidToken" => "the service does not accept the session token",
        "NoSuchBucket" => "the bucket does not exist",
        "PermanentRedirect" | "AuthorizationHeaderMalformed" => "the bucket is in another region: give the volume or its backend its region",
        "SlowDown" => "the service asks for fewer requests",
        _ => return format!("{code}: {message}"),
    };
    format!("{why} ({code}: {message})")
}

/// Finds the cause in the name of an error of the runtime, such as AWS_IO_DNS_QUERY_FAILED.
fn connection(error: &str) -> String {
    const CAUSES: [(&str, &str); 12] = [
        ("AWS_IO_DNS", "the host name cannot be resolved: check the endpoint and the node's DNS"),
        ("AWS_IO_SOCKET_CONNECTION_REFUSED", "connection refused: nothing listens at the endpoint's address and port"),
        ("AWS_IO_SOCKET_TIMEOUT", "no answer to a connection: a firewall or a wrong address"),
        ("AWS_IO_SOCKET_NO_ROUTE_TO_HOST", "no route to the endpoint"),
        ("AWS_IO_SOCKET_NETWORK_DOWN", "the node has no network"),
        ("AWS_IO_TLS_ERROR_NOT_NEGOTIATED", "no TLS at the endpoint: is it http?"),
        ("AWS_IO_TLS", "the certificate of the endpoint is not trusted: give the backend the CA that signed it, and check its name and dates"),
        ("AWS_ERROR_HTTP_CONNECTION_CLOSED", "the endpoint closed the connection"),
        ("AWS_ERROR_HTTP", "the endpoint does not speak HTTP as expected"),
        ("AWS_IO_SOCKET_CLOSED", "the endpoint closed the connection"),
        ("AWS_ERROR_S3_REQUEST_TIMEOUT", "no answer in time"),
        ("CREDENTIALS_PROVIDER", "no credentials: the endpoint that gives them did not answer or refused"),
    ];
    match CAUSES.iter().find(|(name, _)| error.contains(name)) {
        Some((_, cause)) => {
            let name = error.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_').find(|w| w.starts_with("AWS_"));
            format!("{cause} ({})", name.unwrap_or_default())
        }
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_found_by_name() {
        let dns = connection("Error(1059, \"aws-c-io: AWS_IO_DNS_INVALID_NAME, Host name was invalid\")");
        assert!(dns.contains("cannot be resolved") && dns.ends_with("(AWS_IO_DNS_INVALID_NAME)"), "{dns}");
        assert!(connection("AWS_IO_SOCKET_CONNECTION_REFUSED, x").contains("refused"));
        assert!(connection("AWS_IO_TLS_ERROR_NEGOTIATION_FAILURE").contains("certificate"));
        assert_eq!(connection("AWS_ERROR_OOM"), "AWS_ERROR_OOM");
    }

    #[test]
    fn refusals_say_what_to_do() {
        assert!(refusal("RequestTimeTooSkewed", "m").contains("clock"));
        assert_eq!(refusal("Odd", "m"), "Odd: m");
    }
}
