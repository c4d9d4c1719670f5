//! The requests of a trace as chains of 64-bit keys.

use crate::error::{Error, Result};

/// The requests of a trace, their chains one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Prompts<'a> {
    keys: &'a [u64],
    offsets: &'a [usize],
}

impl<'a> Prompts<'a> {
    /// Request `i` asks for `keys[offsets[i]..offsets[i + 1]]`, root first.
    ///
    /// # Errors
    /// [`Error::Config`] unless the offsets begin with 0, never fall, and end with the number of keys.
    pub fn new(keys: &'a [u64], offsets: &'a [usize]) -> Result<Self> {
        let (first, last) = match offsets {
            [] => (None, None),
            [first, ..] => (Some(*first), offsets.last().copied()),
        };
        if first != Some(0) || last != Some(keys.len()) {
            let shown = |offset: Option<usize>| {
                offset.map_or_else(|| "nothing".to_owned(), |offset| offset.to_string())
            };
            return Err(Error::Config(format!(
                "offsets begin with {} and end with {}; they must begin with 0 and end with {}, \
                 the number of keys",
                shown(first),
                shown(last),
                keys.len()
            )));
        }
        if let Some(at) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            return Err(Error::Config(format!(
                "offsets[{}] is {}, less than the {} before it: offsets never fall",
                at + 1,
                offsets[at + 1],
                offsets[at]
            )));
        }
        Ok(Self { keys, offsets })
    }

    /// The requests in turn.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u64]> + '_ {
        self.offsets.windows(2).map(|pair| &self.keys[pair[0]..pair[1]])
    }

    pub(super) fn keys(&self) -> &'a [u64] {
        self.keys
    }

    pub(super) fn offsets(&self) -> &'a [usize] {
        self.offsets
    }
}
