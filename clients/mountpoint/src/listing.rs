//! Listings that a service never ends are an error.

use mountpoint_s3_client::types::ListObjectsResult;
use serde::{Deserialize, Serialize};

/// Where a listing is: the caller's continuation token.
///
/// A service that repeats a token, or a page under another token, would be asked indefinitely. Brent's algorithm finds a cycle of any length
/// within three times as many pages, and keeps one page.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Position {
    /// The service's token of the next page.
    token: String,
    kept: Page,
    /// Pages since then, and after how many the latest page is kept.
    pages: u64,
    until: u64,
}

/// What tells a page from another: the token of the next one, and the first object if it has any.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Page {
    token: String,
    object: Option<String>,
}

impl Page {
    fn repeats(&self, other: &Page) -> bool {
        self.token == other.token || self.object.is_some() && self.object == other.object
    }
}

impl Position {
    /// Reads a caller's token.
    pub fn parse(token: Option<&str>) -> Option<Self> {
        token.and_then(|token| serde_json::from_str(token).ok())
    }

    pub fn token(&self) -> &str {
        &self.token
    }

    /// Replaces the token of a page, which follows the position, by that of the caller; returns an error if the listing is in a cycle.
    pub fn follow(before: Option<Self>, page: &mut ListObjectsResult) -> Result<(), String> {
        let object = page.objects.first().map(|object| object.key.clone());
        Self::next(before, &mut page.next_continuation_token, object)
    }

    fn next(before: Option<Self>, token: &mut Option<String>, object: Option<String>) -> Result<(), String> {
        let Some(next) = token.take() else { return Ok(()) };
        let page = Page { token: next.clone(), object };
        let mut position = before.unwrap_or_default();
        if position.until > 0 && position.kept.repeats(&page) {
            return Err(format!("the service repeats a page of a listing (continuation token {next:?})"));
        }
        position.token = next;
        position.pages += 1;
        if position.pages > position.until {
            position = Position { token: position.token, kept: page, pages: 0, until: (2 * position.until).max(1) };
        }
        *token = serde_json::to_string(&position).ok();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns after how many pages a listing ends or is refused, if the service answers with these tokens and first objects.
    fn pages(answer: impl Fn(u64) -> (Option<String>, Option<String>)) -> (u64, bool) {
        let mut token: Option<String> = None;
        for n in 0..10_000 {
            let (next, object) = answer(n);
            let before = Position::parse(token.as_deref());
            token = next;
            if Position::next(before, &mut token, object).is_err() {
                return (n, false);
            }
            if token.is_none() {
                return (n, true);
            }
        }
        panic!("the listing does not end");
    }

    #[test]
    fn cycles_are_refused() {
        for (before, cycle) in [(0, 1), (0, 2), (3, 1), (5, 7), (100, 30)] {
            let at = move |n: u64| if n < before { n } else { before + (n - before) % cycle };
            for tokens_differ in [false, true] {
                let (n, ended) = pages(|n| match tokens_differ {
                    false => (Some(at(n).to_string()), None),
                    true => (Some(n.to_string()), Some(at(n).to_string())),
                });
                assert!(!ended && n <= 3 * (before + cycle) + 2, "{before} {cycle}: {n}");
            }
        }
    }

    #[test]
    fn long_listings_end() {
        let ends = pages(|n| ((n < 5000).then(|| n.to_string()), (n % 3 > 0).then(|| format!("key {n}"))));
        assert_eq!(ends, (5000, true));
        assert_eq!(pages(|_| (None, None)), (0, true));
    }
}
