//! Chained block hashes of tokens, bit-identical to vLLM's. `message` has the encoded form of a
//! block.
//!
//! May import: cbor, error, integers, key, pickle, sha256.
//!
//! The reference is `hash_block_tokens` of vLLM 0.32 (`vllm/v1/core/kv_cache_utils.py`) with the
//! hash functions `sha256`, `sha256_cbor` and `xxhash_cbor` (`vllm/utils/hashing.py`). A block's
//! digest is `H(encode((previous, tokens, extra)))`, where H is SHA-256, or XXH3-128 with its digest
//! big-endian. `sha256` encodes with Python's pickle (see `pickle`), and the core encodes only what
//! [`HashOptions::is_native`] names. The others encode with CBOR, in RFC 8949's deterministic form,
//! with shortest heads and definite lengths:
//!
//! ```text
//! 83                    an array of three:
//!   58 20 <32 bytes>      the previous block's digest, a byte string (50 <16 bytes> for XXH3-128)
//!   90 <16 integers>      the tokens, an array (98 20 for 32 of them, 99 01 00 for 256)
//!   f6                    no extra keys; or an array of them, 80 if it is empty
//! ```
//!
//! The first block's previous digest is `H(encode(seed))`, where the seed is a text string. Hashes of
//! two programs match only if their seeds do. vLLM's seed is `PYTHONHASHSEED` if it is set.
//! Otherwise it is [`DEFAULT_SEED`] for SHA-256, and a random string per process for
//! `xxhash_cbor`, which is not collision resistant.

mod message;

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use minicbor::data::Type;
use minicbor::decode::{Decode, Decoder, Error as DecodeError};
use minicbor::encode::{Encode, Encoder, Error as EncodeError, Write};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, Result};
use crate::key::{self, BlockHash, HashWidth, Hashes, MAX_HASH_BYTES, Parent};
use crate::pickle;
use crate::sha256;
use message::Message;

/// vLLM's seed for `sha256` and `sha256_cbor` if `PYTHONHASHSEED` is not set.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// The largest token id.
pub const MAX_TOKEN: u64 = 1 << 63;

/// The depth to which extra keys may nest. vLLM's own are two deep. Encoding recurses, so the bound
/// protects the stack.
pub const MAX_EXTRA_KEY_DEPTH: usize = 32;

/// The function that turns an encoded block into a digest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256 of CBOR, 32 bytes.
    #[default]
    Sha256Cbor,
    /// SHA-256 of Python's pickle, 32 bytes: vLLM's default.
    Sha256,
    /// XXH3-128, 16 bytes: fast, but an adversary can make two prompts collide.
    XxhashCbor,
}

impl Algorithm {
    /// Its name in vLLM's `--prefix-caching-hash-algo`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256Cbor => "sha256_cbor",
            Self::Sha256 => "sha256",
            Self::XxhashCbor => "xxhash_cbor",
        }
    }

    /// The width of its digests.
    pub const fn digest_bytes(self) -> usize {
        match self {
            Self::Sha256Cbor | Self::Sha256 => 32,
            Self::XxhashCbor => 16,
        }
    }

    /// The digest of the first `num_bytes` of `message`, padded with zeros. It takes
    /// [`sha256::MAX_PADDING_BYTES`] more.
    #[expect(clippy::inline_always, reason = "the algorithm is often a constant")]
    #[inline(always)]
    fn digest(self, message: &mut [u8], num_bytes: usize) -> BlockHash {
        match self {
            Self::Sha256Cbor | Self::Sha256 => sha256::digest(message, num_bytes),
            Self::XxhashCbor => {
                let mut padded = [0; MAX_HASH_BYTES];
                let digest = xxh3_128(&message[..num_bytes]);
                padded[..16].copy_from_slice(&digest.to_be_bytes());
                padded
            }
        }
    }

    /// The previous digest of a prompt's first block.
    fn first(self, seed: &str) -> Result<BlockHash> {
        let mut message = match self {
            Self::Sha256 => pickle::of_text(seed),
            _ => minicbor::to_vec(seed).map_err(unencodable)?,
        };
        let num_bytes = message.len();
        message.resize(num_bytes + sha256::MAX_PADDING_BYTES, 0);
        Ok(self.digest(&mut message, num_bytes))
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "sha256_cbor" => Ok(Self::Sha256Cbor),
            "sha256" => Ok(Self::Sha256),
            "xxhash_cbor" => Ok(Self::XxhashCbor),
            _ => Err(Error::Config(format!(
                "hash algorithm {name:?} is not known: use \"sha256\", \"sha256_cbor\" or \
                 \"xxhash_cbor\", and start vLLM with the same --prefix-caching-hash-algo"
            ))),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A value besides tokens that a block's KV depends on: an adapter, an image, a cache salt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Python's `None`.
    Null,
    /// A bool.
    Bool(bool),
    /// An integer. Outside -2^64 to 2^64 - 1 it is encoded as CBOR's big number.
    Int(i128),
    /// A byte string.
    Bytes(Vec<u8>),
    /// A text string.
    Text(String),
    /// A tuple or list, at most [`MAX_EXTRA_KEY_DEPTH`] deep.
    Sequence(Vec<ExtraKey>),
}

/// The extra keys of one block. None and an empty list differ, as in vLLM.
pub type BlockExtraKeys = Option<Vec<ExtraKey>>;

impl ExtraKey {
    /// Whether it nests at most `levels` sequences.
    fn fits(&self, levels: usize) -> bool {
        match self {
            Self::Sequence(keys) => levels > 0 && keys.iter().all(|key| key.fits(levels - 1)),
            _ => true,
        }
    }
}

impl<C> Encode<C> for ExtraKey {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        match self {
            Self::Null => encoder.null()?,
            Self::Bool(value) => encoder.bool(*value)?,
            Self::Int(value) => encoder.i128(*value)?,
            Self::Bytes(value) => encoder.bytes(value)?,
            Self::Text(value) => encoder.str(value)?,
            Self::Sequence(keys) => encoder.encode_with(keys, context)?,
        };
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for ExtraKey {
    fn decode(decoder: &mut Decoder<'b>, _: &mut C) -> Result<Self, DecodeError> {
        Self::decode_nested(decoder, MAX_EXTRA_KEY_DEPTH)
    }
}

impl ExtraKey {
    /// Reads a key that nests at most `levels` sequences, because its writer must not control the
    /// depth of the stack.
    fn decode_nested(decoder: &mut Decoder<'_>, levels: usize) -> Result<Self, DecodeError> {
        Ok(match decoder.datatype()? {
            Type::Null => decoder.null().map(|()| Self::Null)?,
            Type::Bool => Self::Bool(decoder.bool()?),
            Type::Bytes => Self::Bytes(decoder.bytes()?.to_vec()),
            Type::String => Self::Text(decoder.str()?.to_owned()),
            Type::Array => {
                let Some(levels) = levels.checked_sub(1) else {
                    return Err(DecodeError::message("an extra key nests too deeply"));
                };
                let num_keys = decoder.array()?.unwrap_or(0);
                let keys = (0..num_keys).map(|_| Self::decode_nested(decoder, levels));
                Self::Sequence(keys.collect::<Result<_, _>>()?)
            }
            _ => Self::Int(decoder.i128()?),
        })
    }
}

/// What digests depend on besides tokens. The default is the start of a prompt with `sha256_cbor`.
#[derive(Clone, Copy, Debug, Default)]
pub struct HashOptions<'a> {
    /// The hash function.
    pub algorithm: Algorithm,
    /// The digest of the block before the first; None or empty at the start of a prompt.
    pub parent: Option<&'a [u8]>,
    /// One entry per full block.
    pub extra_keys: Option<&'a [BlockExtraKeys]>,
    /// Determines the previous digest of a prompt's first block; [`DEFAULT_SEED`] if None.
    pub seed: Option<&'a str>,
}

impl HashOptions<'_> {
    /// Whether the core encodes such blocks itself. With [`Algorithm::Sha256`] it must not have
    /// extra keys, because pickle writes an object that it meets twice as a reference, and Rust
    /// cannot tell the object from its copy. A pickle must also fit one frame.
    pub fn is_native(&self, block_size: usize) -> bool {
        self.algorithm != Algorithm::Sha256
            || block_size <= pickle::MAX_TOKENS
                && self.seed.is_none_or(|seed| seed.len() <= pickle::MAX_TEXT_BYTES)
                && self.extra_keys.is_none_or(|blocks| blocks.iter().all(Option::is_none))
    }
}

/// Hashes the full blocks of `tokens`. A partial last block gets no digest.
///
/// ```
/// use kvstow_core::hash::{HashOptions, hash_tokens};
///
/// let tokens: Vec<u64> = (0..40).collect();
/// let whole = hash_tokens(&tokens, 16, HashOptions::default())?;
/// assert_eq!(whole.len(), 2);
///
/// // A chain continues from any digest.
/// let first = whole.width().digest(&whole.as_slice()[0]);
/// assert_eq!(first[..4], [0xdc, 0x91, 0x8a, 0x88]);
/// let options = HashOptions { parent: Some(first), ..HashOptions::default() };
/// let rest = hash_tokens(&tokens[16..], 16, options)?;
/// assert_eq!(rest.as_slice(), &whole.as_slice()[1..]);
/// # Ok::<(), kvstow_core::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Config`] for a block size of 0, a token above 2^63, a parent of another width than the
/// algorithm's digests, a number of extra keys other than the number of full blocks, extra keys
/// that nest too deeply, or options that are not native.
pub fn hash_tokens(tokens: &[u64], block_size: usize, options: HashOptions<'_>) -> Result<Hashes> {
    let num_blocks = check_options(tokens.len(), block_size, options)?;
    if !options.is_native(block_size) {
        return Err(Error::Config(format!(
            "blocks of {block_size} tokens have extra keys, or a pickle of more than one frame: \
             hash them with Python's pickle, or use \"sha256_cbor\""
        )));
    }
    let HashOptions { algorithm, parent, extra_keys, seed } = options;

    if num_blocks == 0 {
        check_tokens(tokens)?;
        return Ok(Hashes::default());
    }
    let parent = parent_of(parent);
    let previous = match parent {
        Parent::Block(hash) => hash,
        _ => algorithm.first(seed.unwrap_or(DEFAULT_SEED))?,
    };
    let extra_keys = extra_keys.unwrap_or_default();
    // With a constant algorithm, the compiler keeps the previous digest in registers.
    let chain = match algorithm {
        Algorithm::Sha256Cbor => {
            chains(Algorithm::Sha256Cbor, previous, tokens, block_size, extra_keys)
        }
        Algorithm::Sha256 => chains(Algorithm::Sha256, previous, tokens, block_size, extra_keys),
        Algorithm::XxhashCbor => {
            chains(Algorithm::XxhashCbor, previous, tokens, block_size, extra_keys)
        }
    };
    let (hashes, any_bits) = chain.map_err(unencodable)?;
    let rest = &tokens[num_blocks * block_size..];
    if bits_of(any_bits, rest) > MAX_TOKEN {
        check_tokens(tokens)?; // it was hashed for nothing
    }
    let width = HashWidth::of(algorithm.digest_bytes())?;
    Ok(Hashes::new(width, &Arc::new(hashes)).behind(parent))
}

/// What follows from the argument `parent`, whose width was checked.
pub fn parent_of(digest: Option<&[u8]>) -> Parent {
    match digest {
        Some(digest) if !digest.is_empty() => Parent::Block(key::pad(digest)),
        _ => Parent::Start,
    }
}

/// The padded digests of the full blocks of `tokens`, and all bits of these tokens.
#[expect(clippy::inline_always, reason = "the algorithm is a constant")]
#[inline(always)]
fn chains(
    algorithm: Algorithm,
    previous: BlockHash,
    tokens: &[u64],
    block_size: usize,
    extra_keys: &[BlockExtraKeys],
) -> Result<(Vec<BlockHash>, u64), EncodeError<Infallible>> {
    let message = Message::new(algorithm, block_size)?;
    // With a constant number of tokens, the compiler unrolls what writes them.
    match block_size {
        16 => chain(message, algorithm, previous, tokens.as_chunks::<16>().0.iter(), extra_keys),
        32 => chain(message, algorithm, previous, tokens.as_chunks::<32>().0.iter(), extra_keys),
        64 => chain(message, algorithm, previous, tokens.as_chunks::<64>().0.iter(), extra_keys),
        _ => chain(message, algorithm, previous, tokens.chunks_exact(block_size), extra_keys),
    }
}

/// The padded digests of blocks, and all bits of their tokens. There is one entry of extra keys for
/// each block, or none at all.
#[expect(clippy::inline_always, reason = "the algorithm and the size of a block are constants")]
#[inline(always)]
fn chain(
    mut message: Message,
    algorithm: Algorithm,
    mut previous: BlockHash,
    blocks: impl ExactSizeIterator<Item: AsRef<[u64]>>,
    extra_keys: &[BlockExtraKeys],
) -> Result<(Vec<BlockHash>, u64), EncodeError<Infallible>> {
    let mut hashes = Vec::with_capacity(blocks.len());
    let mut any_bits = 0;
    for (block, tokens) in blocks.enumerate() {
        any_bits = bits_of(any_bits, tokens.as_ref());
        let extra = extra_keys.get(block).and_then(Option::as_deref);
        message.write(algorithm, tokens.as_ref(), extra)?;
        // After the tokens, which the processor can write before it knows the digest.
        previous = message.digest(algorithm, &previous);
        hashes.push(previous);
    }
    Ok((hashes, any_bits))
}

/// These bits and those of tokens.
#[inline]
fn bits_of(bits: u64, tokens: &[u64]) -> u64 {
    tokens.iter().fold(bits, |bits, token| bits | token)
}

/// Returns the number of full blocks.
///
/// # Errors
/// As [`hash_tokens`], but options need not be native.
pub fn check(tokens: &[u64], block_size: usize, options: HashOptions<'_>) -> Result<usize> {
    check_tokens(tokens)?;
    check_options(tokens.len(), block_size, options)
}

fn check_tokens(tokens: &[u64]) -> Result<()> {
    // All bits are gathered many tokens at a time, unlike the position of the first bad token.
    if bits_of(0, tokens) > MAX_TOKEN
        && let Some(position) = tokens.iter().position(|token| *token > MAX_TOKEN)
    {
        return Err(token_out_of_bounds(position, &tokens[position]));
    }
    Ok(())
}

fn check_options(num_tokens: usize, block_size: usize, options: HashOptions<'_>) -> Result<usize> {
    let HashOptions { algorithm, parent, extra_keys, .. } = options;
    if block_size == 0 {
        return Err(Error::Config("block_size is 0: a block has at least 1 token".to_owned()));
    }
    let parent_bytes = parent.map_or(0, <[u8]>::len);
    if parent_bytes != 0 && parent_bytes != algorithm.digest_bytes() {
        return Err(Error::Config(format!(
            "parent has {parent_bytes} bytes and {algorithm} digests have {}: pass a digest of the \
             same algorithm, or None at the start of a prompt",
            algorithm.digest_bytes()
        )));
    }
    let num_blocks = num_tokens / block_size;
    let Some(extra_keys) = extra_keys else {
        return Ok(num_blocks);
    };
    if extra_keys.len() != num_blocks {
        return Err(Error::Config(format!(
            "extra_keys has {} entries and the tokens fill {num_blocks} blocks of {block_size}: \
             pass one entry per full block, None where a block has none",
            extra_keys.len()
        )));
    }
    let too_deep =
        |keys: &BlockExtraKeys| keys.iter().flatten().any(|key| !key.fits(MAX_EXTRA_KEY_DEPTH));
    match extra_keys.iter().position(too_deep) {
        Some(block) => Err(extra_keys_too_deep(block)),
        None => Ok(num_blocks),
    }
}

/// The error for a token that is out of bounds, whatever type it came in.
pub fn token_out_of_bounds(position: usize, token: &impl fmt::Display) -> Error {
    Error::Config(format!("token {position} is {token}: token ids go from 0 to 2**63"))
}

/// The error for extra keys that nest deeper than [`MAX_EXTRA_KEY_DEPTH`].
pub fn extra_keys_too_deep(block: usize) -> Error {
    Error::Config(format!(
        "the extra keys of block {block} nest deeper than {MAX_EXTRA_KEY_DEPTH} levels: flatten them"
    ))
}

/// Writing to memory cannot fail, but the encoder's signature has an error.
#[expect(clippy::needless_pass_by_value, reason = "the signature that map_err calls")]
fn unencodable(error: EncodeError<Infallible>) -> Error {
    Error::Broken(format!("a block's CBOR form could not be written: {error}"))
}
