//! Requests by the caller's id. The hasher has no key, because the core uses no randomness.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::{Error, Result};

/// Requests in a vector, and the place of each by its id. So a call that names many requests looks
/// up each once. When a request is removed, the last takes its place: no caller may depend on the
/// order.
#[derive(Clone, Debug)]
pub(crate) struct Requests<T> {
    places: HashMap<Arc<str>, usize, BuildHasherDefault<NameHasher>>,
    requests: Vec<(Arc<str>, T)>,
}

impl<T> Default for Requests<T> {
    fn default() -> Self {
        Self { places: HashMap::default(), requests: Vec::new() }
    }
}

impl<T> Requests<T> {
    /// The place of a request. It is valid until a request is removed.
    #[inline]
    pub(crate) fn place(&self, request_id: &str) -> Result<usize> {
        self.places.get(request_id).copied().ok_or_else(|| unknown(request_id))
    }

    /// As [`Requests::place`], but tries the place after `before` first. Steps name requests in the
    /// order in which they were added.
    #[inline]
    pub(crate) fn place_after(&self, before: Option<usize>, request_id: &str) -> Result<usize> {
        self.place_near(before.map_or(0, |place| place + 1), request_id)
    }

    /// As [`Requests::place`], but tries the place `likely` first.
    #[inline]
    pub(crate) fn place_near(&self, likely: usize, request_id: &str) -> Result<usize> {
        match self.requests.get(likely) {
            Some((name, _)) if **name == *request_id => Ok(likely),
            _ => self.place(request_id),
        }
    }

    /// The request at a place.
    #[inline]
    pub(crate) fn at(&self, place: usize) -> &T {
        &self.requests[place].1
    }

    /// As [`Requests::at`].
    #[inline]
    pub(crate) fn at_mut(&mut self, place: usize) -> &mut T {
        &mut self.requests[place].1
    }

    pub(crate) fn get(&self, request_id: &str) -> Result<&T> {
        Ok(self.at(self.place(request_id)?))
    }

    pub(crate) fn get_mut(&mut self, request_id: &str) -> Result<&mut T> {
        let place = self.place(request_id)?;
        Ok(self.at_mut(place))
    }

    pub(crate) fn remove(&mut self, request_id: &str) -> Result<T> {
        let place = self.places.remove(request_id).ok_or_else(|| unknown(request_id))?;
        let (_, request) = self.requests.swap_remove(place);
        if let Some((moved, _)) = self.requests.get(place) {
            self.places.insert(Arc::clone(moved), place);
        }
        Ok(request)
    }

    /// Refuses an id that a request has.
    pub(crate) fn check_new(&self, request_id: &str) -> Result<()> {
        if self.places.contains_key(request_id) {
            return Err(Error::State(format!(
                "request {request_id:?} was added before: free or finish it before you add it again"
            )));
        }
        Ok(())
    }

    /// Inserts a request whose id [`Requests::check_new`] has accepted.
    pub(crate) fn insert(&mut self, request_id: &str, request: T) {
        let name: Arc<str> = request_id.into();
        self.places.insert(Arc::clone(&name), self.requests.len());
        self.requests.push((name, request));
    }

    /// The requests with their ids.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.requests.iter().map(|(name, request)| (&**name, request))
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.requests.iter().map(|(_, request)| request)
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.requests.iter_mut().map(|(_, request)| request)
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }
}

/// A hasher for ids, which are short. The standard hasher takes several times as long.
#[derive(Clone, Copy, Debug, Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    /// `str` ends with this byte, which separates strings. Here is only one.
    #[inline]
    fn write_u8(&mut self, _: u8) {}

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

fn unknown(request_id: &str) -> Error {
    Error::UnknownRequest { request_id: request_id.to_owned() }
}
