//! Block hashes and keys.
//!
//! A hash has 1 to 32 bytes, and all hashes of an object have one width. The core pads every hash
//! with zeros to 32 bytes, so that keys lie in flat arrays.

use std::sync::Arc;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::GroupId;

/// The widest digest a block hash may have, in bytes.
pub const MAX_HASH_BYTES: usize = 32;

/// A digest chained over the whole prefix, padded with zeros to 32 bytes.
pub type BlockHash = [u8; MAX_HASH_BYTES];

/// The key of a cached block: its hash, and the group whose KV it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct BlockKey {
    /// The digest over the block's tokens and everything before them.
    #[n(0)]
    #[cbor(with = "minicbor::bytes")]
    pub hash: BlockHash,
    /// The group of layers.
    #[n(1)]
    pub group: GroupId,
}

/// The hashes of consecutive blocks, all of one width. Clones share them, and nothing changes them.
///
/// Two are equal if their hashes are, whatever is known of the block before them.
#[derive(Clone, Debug, Default)]
pub struct Hashes {
    width: HashWidth,
    shared: SharedHashes,
    parent: Parent,
}

/// What is known of the block before the first of some hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Parent {
    /// Nothing.
    #[default]
    Unknown,
    /// There is none: the hashes are those of a prompt from its start.
    Start,
    /// The block with this padded hash.
    Block(BlockHash),
}

impl PartialEq for Hashes {
    fn eq(&self, other: &Self) -> bool {
        self.width == other.width && self.shared == other.shared
    }
}

impl Eq for Hashes {}

/// Hashes that a request, its ledger and its scheduler may share.
pub(crate) type SharedHashes = Arc<Vec<BlockHash>>;

impl Hashes {
    /// Hashes of a known width.
    pub(crate) fn new(width: HashWidth, hashes: &SharedHashes) -> Self {
        let width = if hashes.is_empty() { HashWidth::default() } else { width };
        Self { width, shared: Arc::clone(hashes), parent: Parent::Unknown }
    }

    /// The same hashes, behind this block.
    #[must_use]
    pub fn behind(self, parent: Parent) -> Self {
        Self { parent, ..self }
    }

    /// What is known of the block before the first.
    pub fn parent(&self) -> Parent {
        self.parent
    }

    /// Refuses hashes that are known not to continue those of a request. A block would get the key
    /// of other tokens than it holds.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn check_continues(&self, known: &[BlockHash]) -> Result<()> {
        let fix = "hash only the tokens after the request's last hash, with that hash as parent";
        let why = match (self.parent, known.last()) {
            (Parent::Start, Some(_)) => {
                format!("begin a prompt, and the request has {} hashes: {fix}", known.len())
            }
            (Parent::Block(parent), Some(last)) if parent != *last => {
                format!("continue another block than the request's last: {fix}")
            }
            (Parent::Block(_), None) => {
                "continue a block, and the request has no hashes yet: hash its tokens from the start"
                    .to_owned()
            }
            _ => return Ok(()),
        };
        if self.is_empty() { Ok(()) } else { Err(Error::Config(format!("the hashes {why}"))) }
    }

    /// Refuses hashes that are known not to continue others, which a list puts before them.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check_follows(&self, before: &Self) -> Result<()> {
        let why = match (self.parent, before.as_slice().last()) {
            (Parent::Start, Some(_)) => "begin a prompt",
            (Parent::Block(parent), Some(last)) if parent != *last => "continue another block",
            _ => return Ok(()),
        };
        if self.is_empty() {
            return Ok(());
        }
        Err(Error::Config(format!(
            "the hashes {why}, and stand behind {} others: pass the last of these to hash_tokens \
             as parent; collect hashes of several prompts in a list",
            before.len()
        )))
    }

    /// The padded hashes.
    pub fn as_slice(&self) -> &[BlockHash] {
        &self.shared
    }

    /// The digests, in the width in which they were given.
    pub fn digests(&self) -> impl DoubleEndedIterator<Item = &[u8]> + ExactSizeIterator {
        self.shared.iter().map(|hash| self.width.digest(hash))
    }

    /// Their common width; unknown while the list is empty.
    pub fn width(&self) -> HashWidth {
        self.width
    }

    /// Number of hashes.
    pub fn len(&self) -> usize {
        self.shared.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty()
    }

    /// Appends these hashes to a list. An empty list shares them, and one that others share is
    /// copied first.
    pub(crate) fn append_to(&self, list: &mut SharedHashes) {
        if list.is_empty() {
            *list = Arc::clone(&self.shared);
        } else if let Some(own) = Arc::get_mut(list) {
            own.extend_from_slice(&self.shared);
        } else if !self.is_empty() {
            *list = Arc::new([list.as_slice(), self.as_slice()].concat());
        }
    }
}

/// Collects [`Hashes`].
#[derive(Debug, Default)]
pub struct HashesBuilder {
    width: HashWidth,
    hashes: Vec<BlockHash>,
}

impl HashesBuilder {
    /// An empty list with room for `capacity` hashes.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { width: HashWidth::default(), hashes: Vec::with_capacity(capacity) }
    }

    /// Appends one digest.
    ///
    /// # Errors
    /// [`Error::HashWidth`] if it is empty, longer than 32 bytes, or not as wide as the others.
    #[inline]
    pub fn push(&mut self, digest: &[u8]) -> Result<()> {
        if digest.len() != usize::from(self.width.0) || digest.is_empty() {
            self.width.agree(HashWidth::of(digest.len())?)?;
        }
        // A copy of constant length is a move or two, any other copy is a call.
        let hash = match digest.first_chunk::<MAX_HASH_BYTES>() {
            Some(whole) => *whole,
            None => pad(digest),
        };
        self.hashes.push(hash);
        Ok(())
    }

    /// The hashes, moved and not copied.
    pub fn finish(self) -> Hashes {
        Hashes { width: self.width, shared: Arc::new(self.hashes), parent: Parent::Unknown }
    }
}

/// A digest of at most 32 bytes, padded with zeros.
#[inline]
pub(crate) fn pad(digest: &[u8]) -> BlockHash {
    let mut hash = [0; MAX_HASH_BYTES];
    match digest.first_chunk::<16>() {
        Some(half) if digest.len() == 16 => hash[..16].copy_from_slice(half),
        _ => hash[..digest.len()].copy_from_slice(digest),
    }
    hash
}

/// The width of an object's hashes in bytes; unknown before the first hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(transparent)]
pub struct HashWidth(#[n(0)] u8);

impl HashWidth {
    /// A known width.
    ///
    /// # Errors
    /// [`Error::HashWidth`] unless it is 1 to 32.
    #[inline]
    pub fn of(num_bytes: usize) -> Result<Self> {
        match u8::try_from(num_bytes) {
            Ok(width @ 1..=32) => Ok(Self(width)),
            _ => Err(Error::HashWidth { expected: None, got: num_bytes }),
        }
    }

    /// Refuses a width that differs from this one. Changes nothing.
    ///
    /// # Errors
    /// [`Error::HashWidth`] if both are known and differ.
    #[inline]
    pub fn check(self, other: Self) -> Result<()> {
        if self.0 == other.0 || self.0 == 0 || other.0 == 0 {
            return Ok(());
        }
        Err(Error::HashWidth { expected: Some(self.0), got: usize::from(other.0) })
    }

    /// Adopts `other` if this width is unknown.
    ///
    /// # Errors
    /// As [`HashWidth::check`].
    #[inline]
    pub fn agree(&mut self, other: Self) -> Result<()> {
        self.check(other)?;
        if self.0 == 0 {
            *self = other;
        }
        Ok(())
    }

    /// Whether a hash can have this width, which came from a snapshot.
    pub(crate) fn is_sound(self) -> bool {
        usize::from(self.0) <= MAX_HASH_BYTES
    }

    /// Whether a padded hash, which came from a snapshot, has this width.
    pub(crate) fn fits(self, hash: &BlockHash) -> bool {
        let (digest, padding) = hash.split_at(usize::from(self.0));
        !digest.is_empty() && padding.iter().all(|&byte| byte == 0)
    }

    /// The digest that the caller gave: the first bytes of a padded hash.
    pub fn digest(self, hash: &BlockHash) -> &[u8] {
        &hash[..usize::from(self.0)]
    }
}

/// Hashes in a snapshot: one byte string with all of them.
pub(crate) mod flat {
    use minicbor::decode::{self, Decoder};
    use minicbor::encode::{self, Encoder, Write};

    use super::{BlockHash, MAX_HASH_BYTES, SharedHashes};

    pub(crate) fn encode<C, W: Write>(
        hashes: &[BlockHash],
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        encoder.bytes(hashes.as_flattened())?.ok()
    }

    pub(crate) fn decode<C>(
        decoder: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<SharedHashes, decode::Error> {
        match decoder.bytes()?.as_chunks::<MAX_HASH_BYTES>() {
            (hashes, []) => Ok(hashes.to_vec().into()),
            _ => Err(decode::Error::message("a byte string of hashes that ends inside a hash")),
        }
    }
}
