//! Requests by their caller's name. The hasher has fixed keys: the core draws no randomness.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::error::{Error, Result};

/// A map from request id to what is kept of it. Nothing may depend on its order.
#[derive(Clone, Debug)]
pub(crate) struct Requests<T>(HashMap<String, T, BuildHasherDefault<DefaultHasher>>);

impl<T> Default for Requests<T> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<T> Requests<T> {
    pub(crate) fn get(&self, request_id: &str) -> Result<&T> {
        self.0.get(request_id).ok_or_else(|| unknown(request_id))
    }

    pub(crate) fn get_mut(&mut self, request_id: &str) -> Result<&mut T> {
        self.0.get_mut(request_id).ok_or_else(|| unknown(request_id))
    }

    pub(crate) fn remove(&mut self, request_id: &str) -> Result<T> {
        self.0.remove(request_id).ok_or_else(|| unknown(request_id))
    }

    /// Refuses a request that is known already.
    pub(crate) fn check_new(&self, request_id: &str) -> Result<()> {
        if self.0.contains_key(request_id) {
            return Err(Error::State(format!(
                "request {request_id:?} is known already: free or finish it before adding it again"
            )));
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, request_id: &str, request: T) {
        self.0.insert(request_id.to_owned(), request);
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.0.values()
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

fn unknown(request_id: &str) -> Error {
    Error::UnknownRequest { request_id: request_id.to_owned() }
}
