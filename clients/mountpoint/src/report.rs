//! Reports to the helper: lines of JSON on standard output.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use mountpoint_s3_client::OnTelemetry;
use mountpoint_s3_crt::common::error::Error;
use mountpoint_s3_crt::http::request_response::Headers;
use mountpoint_s3_crt::s3::client::{RequestMetrics, RequestType};
use serde::Serialize;

/// The shortest time between two lines about the uploads, and the usual one between two about requests.
const UPLOADS_EVERY: Duration = Duration::from_millis(100);
const REQUESTS_EVERY: Duration = Duration::from_secs(10);

/// Upper bounds of the latency buckets, in milliseconds; there is one more for what takes longer.
const LATENCIES: [u64; 8] = [5, 25, 100, 250, 1000, 5000, 15000, 60000];

/// Counts what the client does, and reports it.
#[derive(Debug, Default)]
pub struct Report {
    state: Mutex<State>,
    changed: Condvar,
    handshake: Mutex<Option<oneshot::Sender<Error>>>,
}

#[derive(Debug, Default)]
struct State {
    uploads: Uploads,
    requests: Requests,
    /// Why files are not stored whose programs were not told, by key.
    unstored: BTreeMap<String, String>,
}

/// How many files that are not stored are known by key: the first.
const UNSTORED: usize = 1000;

/// Files that are not stored although they were closed without an error, and one of them.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
struct Unstored {
    files: usize,
    name: String,
    reason: String,
}

/// The uploads in flight: files, and the bytes that they have so far.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
struct Uploads {
    uploads: u64,
    bytes: u64,
}

/// What was asked of the service since the start.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
struct Requests {
    read: u64,
    written: u64,
    operations: BTreeMap<&'static str, Operation>,
}

/// One kind of request. Errors are answers from 400 on, but for those that an object is missing, and requests without an answer.
/// Throttles are those of them that ask for fewer requests.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
struct Operation {
    requests: u64,
    errors: u64,
    throttles: u64,
    milliseconds: u64,
    latencies: [u64; LATENCIES.len() + 1],
}

impl Report {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Counts an upload until its result is dropped.
    pub fn upload(self: &Arc<Self>) -> Upload {
        self.state().uploads.uploads += 1;
        self.changed.notify_all();
        Upload { report: self.clone(), bytes: 0 }
    }

    /// Returns the error of the next TLS handshake that fails. The runtime tries again, which does not help and takes minutes, because it
    /// delays the answer to each failed handshake by up to half a minute.
    pub fn failed_handshake(&self) -> oneshot::Receiver<Error> {
        let (sender, receiver) = oneshot::channel();
        *self.handshake.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(sender);
        receiver
    }

    /// Notes that a file is not stored although it was closed without an error.
    pub fn unstored(&self, key: &str, reason: String) {
        tracing::error!("{key:?} is not stored, although it was closed: {reason}");
        let mut state = self.state();
        if state.unstored.len() < UNSTORED {
            state.unstored.insert(key.to_owned(), reason);
        }
        self.changed.notify_all();
    }

    /// Notes that a later version of a file is stored.
    pub fn stored(&self, key: &str) {
        if self.state().unstored.remove(key).is_some() {
            self.changed.notify_all();
        }
    }

    /// Waits until no upload is in flight.
    pub fn wait_for_uploads(&self) {
        let mut state = self.state();
        while state.uploads.uploads > 0 {
            state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Writes reports until the process exits.
    pub fn run(&self, out: impl Write) {
        let mut lines = Lines::new(out);
        let mut next = Instant::now() + REQUESTS_EVERY;
        let mut state = self.state();
        loop {
            if lines.uploads == Some(state.uploads) && lines.unstored == state.lost() && next > Instant::now() {
                let wait = next.saturating_duration_since(Instant::now());
                state = self.changed.wait_timeout(state, wait).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
                continue;
            }
            let (uploads, unstored) = (state.uploads, state.lost());
            let requests = (next <= Instant::now()).then(|| state.requests.clone());
            drop(state);
            lines.unstored(unstored);
            lines.uploads(uploads);
            if let Some(requests) = requests {
                lines.requests(requests);
                next = Instant::now() + REQUESTS_EVERY;
            }
            std::thread::sleep(UPLOADS_EVERY);
            state = self.state();
        }
    }

    /// Reports everything, for the last time.
    pub fn finish(&self, out: impl Write) {
        let mut lines = Lines::new(out);
        let state = self.state();
        lines.unstored(state.lost());
        lines.requests(state.requests.clone());
    }
}

impl State {
    fn lost(&self) -> Unstored {
        match self.unstored.first_key_value() {
            Some((key, reason)) => Unstored { files: self.unstored.len(), name: short(key), reason: short(reason) },
            None => Unstored::default(),
        }
    }
}

/// Shortens a text to what a report may have.
fn short(text: &str) -> String {
    const LONGEST: usize = 200;
    let end = text.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= LONGEST).last().unwrap_or(0);
    if end < text.len() { format!("{}…", &text[..end]) } else { text.to_owned() }
}

/// Lines that differ from those before them. The first says that there are no uploads.
struct Lines<W> {
    out: W,
    uploads: Option<Uploads>,
    requests: Requests,
    unstored: Unstored,
}

impl<W: Write> Lines<W> {
    fn new(out: W) -> Self {
        Self { out, uploads: None, requests: Requests::default(), unstored: Unstored::default() }
    }

    fn unstored(&mut self, now: Unstored) {
        if self.unstored != now {
            self.line("s3-csi-unstored", &now);
            self.unstored = now;
        }
    }

    fn uploads(&mut self, now: Uploads) {
        if self.uploads != Some(now) {
            self.line("s3-csi-queue", &now);
            self.uploads = Some(now);
        }
    }

    fn requests(&mut self, now: Requests) {
        if self.requests != now {
            self.line("s3-csi-requests", &now);
            self.requests = now;
        }
    }

    /// Writes JSON as encoding/json of Go does. A helper that is gone reads nothing; the client goes on.
    fn line(&mut self, name: &str, value: &impl Serialize) {
        if let Ok(mut json) = serde_json::to_string(value) {
            for (character, escaped) in [("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("\u{2028}", "\\u2028"), ("\u{2029}", "\\u2029")] {
                json = json.replace(character, escaped);
            }
            let _ = self.out.write_all(format!("{name} {json}\n").as_bytes());
            let _ = self.out.flush();
        }
    }
}

/// An upload in flight.
#[derive(Debug)]
pub struct Upload {
    report: Arc<Report>,
    bytes: u64,
}

impl Upload {
    pub fn wrote(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        let mut state = self.report.state();
        state.uploads.bytes += bytes as u64;
        state.requests.written += bytes as u64;
        self.report.changed.notify_all();
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let mut state = self.report.state();
        state.uploads.uploads -= 1;
        state.uploads.bytes -= self.bytes;
        self.report.changed.notify_all();
    }
}

impl OnTelemetry for Report {
    fn on_telemetry(&self, metrics: &RequestMetrics) {
        if metrics.error().to_string().contains("AWS_IO_TLS_ERROR_NEGOTIATION_FAILURE")
            && let Some(sender) = self.handshake.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
        {
            let _ = sender.send(metrics.error());
        }
        let taken = metrics.total_duration().as_millis() as u64;
        let read = match metrics.request_type() {
            RequestType::GetObject => metrics.response_headers().and_then(|headers| content_length(&headers)),
            _ => None,
        };
        self.answered(operation(metrics.request_type()), metrics.status_code(), taken, read.unwrap_or(0));
    }
}

impl Report {
    fn answered(&self, name: &'static str, status: Option<i32>, milliseconds: u64, read: u64) {
        let mut state = self.state();
        state.requests.read += read;
        let operation = state.requests.operations.entry(name).or_default();
        operation.requests += 1;
        operation.milliseconds += milliseconds;
        operation.latencies[LATENCIES.partition_point(|bound| *bound < milliseconds)] += 1;
        match status {
            Some(429 | 503) => (operation.errors, operation.throttles) = (operation.errors + 1, operation.throttles + 1),
            Some(0..400 | 404 | 412) => {}
            _ => operation.errors += 1,
        }
    }
}

fn content_length(headers: &Headers) -> Option<u64> {
    headers.get_as_string("Content-Length").ok()?.parse().ok()
}

/// The operation's name in the S3 API. The runtime does not know listings and deletions by name.
fn operation(request: RequestType) -> &'static str {
    match request {
        RequestType::HeadObject => "HeadObject",
        RequestType::GetObject => "GetObject",
        RequestType::ListParts => "ListParts",
        RequestType::CreateMultipartUpload => "CreateMultipartUpload",
        RequestType::UploadPart => "UploadPart",
        RequestType::AbortMultipartUpload => "AbortMultipartUpload",
        RequestType::CompleteMultipartUpload => "CompleteMultipartUpload",
        RequestType::UploadPartCopy => "UploadPartCopy",
        RequestType::CopyObject => "CopyObject",
        RequestType::PutObject => "PutObject",
        RequestType::Unknown => "Other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploads_end_when_they_are_dropped() {
        let report = Arc::new(Report::default());
        let mut first = report.upload();
        let second = report.upload();
        first.wrote(3);
        first.wrote(4);
        assert_eq!(report.state().uploads, Uploads { uploads: 2, bytes: 7 });
        drop(first);
        assert_eq!(report.state().uploads, Uploads { uploads: 1, bytes: 0 });
        drop(second);
        report.wait_for_uploads();
        assert_eq!(report.state().requests.written, 7);
    }

    #[test]
    fn files_that_are_not_stored_are_reported_until_they_are() {
        let report = Report::default();
        report.unstored("v/<a>\n", "AccessDenied".into());
        report.unstored("v/b", "x".repeat(199) + "äö");
        let written = || {
            let mut out = Vec::new();
            report.finish(&mut out);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(), "s3-csi-unstored {\"files\":2,\"name\":\"v/\\u003ca\\u003e\\n\",\"reason\":\"AccessDenied\"}\n");
        report.stored("v/<a>\n");
        assert!(written().contains(&format!("\"files\":1,\"name\":\"v/b\",\"reason\":\"{}…\"", "x".repeat(199))));
        report.stored("v/b");
        assert_eq!(written(), "");
    }

    #[test]
    fn requests_are_counted_by_kind() {
        let report = Report::default();
        for (status, taken) in [(Some(200), 5), (Some(404), 6), (Some(503), 70_000), (Some(500), 0), (None, 0)] {
            report.answered("GetObject", status, taken, 10);
        }
        let mut out = Vec::new();
        report.finish(&mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "s3-csi-requests {\"read\":50,\"written\":0,\"operations\":{\"GetObject\":{\"requests\":5,\"errors\":3,\"throttles\":1,\
             \"milliseconds\":70011,\"latencies\":[3,1,0,0,0,0,0,0,1]}}}\n"
        );
    }

    #[test]
    fn lines_are_written_when_something_changes() {
        let mut out = Vec::new();
        let mut lines = Lines::new(&mut out);
        lines.uploads(Uploads::default());
        lines.uploads(Uploads { uploads: 1, bytes: 8 });
        lines.uploads(Uploads { uploads: 1, bytes: 8 });
        lines.uploads(Uploads::default());
        let line = |uploads, bytes| format!("s3-csi-queue {{\"uploads\":{uploads},\"bytes\":{bytes}}}\n");
        assert_eq!(String::from_utf8(out).unwrap(), [line(0, 0), line(1, 8), line(0, 0)].concat());
    }
}
