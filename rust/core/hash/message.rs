//! The message that a block's hash digests: the previous digest, tokens and extra keys, encoded.

use std::convert::Infallible;

use minicbor::encode::{Encoder, Error as EncodeError};

use super::{Algorithm, ExtraKey};
use crate::cbor::Cbor;
use crate::integers;
use crate::key::{BlockHash, MAX_HASH_BYTES};
use crate::pickle;
use crate::sha256;

/// No extra keys.
const CBOR_NULL: u8 = 0xf6;

/// Where a block in CBOR has a previous digest of SHA-256: behind `83 58 20`.
const CBOR_PREVIOUS: usize = 3;

/// The encoded form of one block after the other, in one buffer.
pub(super) struct Message {
    /// The message, and room for padding.
    bytes: Vec<u8>,
    num_bytes: usize,
    /// Where a block in CBOR has its tokens.
    tokens: usize,
}

impl Message {
    pub(super) fn new(
        algorithm: Algorithm,
        block_size: usize,
    ) -> Result<Self, EncodeError<Infallible>> {
        let zeros = [0; MAX_HASH_BYTES];
        let mut head = Encoder::new(Vec::new());
        head.array(3)?.bytes(&zeros[..algorithm.digest_bytes()])?;
        head.array(block_size as u64)?;
        let mut bytes = head.into_writer();
        let tokens = bytes.len();
        let most = integers::max_bytes(block_size).max(pickle::max_bytes(block_size));
        bytes.resize(tokens + most + sha256::MAX_PADDING_BYTES, 0);
        Ok(Self { bytes, num_bytes: 0, tokens })
    }

    /// Writes a block, without the previous digest.
    #[expect(clippy::inline_always, reason = "the number of tokens is often a constant")]
    #[inline(always)]
    pub(super) fn write(
        &mut self,
        algorithm: Algorithm,
        tokens: &[u64],
        extra: Option<&[ExtraKey]>,
    ) -> Result<(), EncodeError<Infallible>> {
        if algorithm == Algorithm::Sha256 {
            self.num_bytes = pickle::write_block(&mut self.bytes, tokens);
            return Ok(());
        }
        let end = integers::write::<Cbor>(&mut self.bytes, self.tokens, tokens);
        if extra.is_none() {
            self.bytes[end] = CBOR_NULL;
            self.num_bytes = end + 1;
            return Ok(());
        }
        self.write_extra(end, extra)
    }

    /// Writes extra keys behind the tokens of a block in CBOR.
    #[cold]
    fn write_extra(
        &mut self,
        end: usize,
        extra: Option<&[ExtraKey]>,
    ) -> Result<(), EncodeError<Infallible>> {
        let extra = minicbor::to_vec(extra)?;
        self.num_bytes = end + extra.len();
        let room = self.num_bytes + sha256::MAX_PADDING_BYTES;
        self.bytes.resize(room.max(self.bytes.len()), 0);
        self.bytes[end..self.num_bytes].copy_from_slice(&extra);
        Ok(())
    }

    /// The digest of the block that was written, and of the previous digest.
    #[expect(clippy::inline_always, reason = "the algorithm is a constant")]
    #[inline(always)]
    pub(super) fn digest(&mut self, algorithm: Algorithm, previous: &BlockHash) -> BlockHash {
        self.set_previous(algorithm, previous);
        algorithm.digest(&mut self.bytes, self.num_bytes)
    }

    /// Writes the previous digest.
    #[inline]
    fn set_previous(&mut self, algorithm: Algorithm, previous: &BlockHash) {
        let start = match algorithm {
            Algorithm::Sha256Cbor => CBOR_PREVIOUS,
            Algorithm::Sha256 => pickle::PREVIOUS,
            Algorithm::XxhashCbor => return put_words(&mut self.bytes, previous),
        };
        if let Some(place) = self.bytes.get_mut(start..).and_then(<[u8]>::first_chunk_mut) {
            *place = *previous; // a copy of constant length is no call
        }
    }
}

/// Writes the 16 bytes of a digest behind CBOR's two-byte head, in the words that XXH3 reads. A
/// processor waits if it reads a word of which it has just written a part.
#[inline]
fn put_words(message: &mut [u8], digest: &BlockHash) {
    const SHIFT: u32 = 16;
    let Some(words) = message.as_chunks_mut().0.first_chunk_mut::<3>() else { return };
    let [first, second, ..] = *digest.as_chunks().0 else { return };
    let (first, second) = (u64::from_le_bytes(first), u64::from_le_bytes(second));
    let head = u64::from_le_bytes(words[0]) & !(u64::MAX << SHIFT);
    let tokens = u64::from_le_bytes(words[2]) & (u64::MAX << SHIFT);
    words[0] = (head | first << SHIFT).to_le_bytes();
    words[1] = (first >> (u64::BITS - SHIFT) | second << SHIFT).to_le_bytes();
    words[2] = (second >> (u64::BITS - SHIFT) | tokens).to_le_bytes();
}
