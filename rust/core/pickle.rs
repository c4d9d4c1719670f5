//! Python's pickle of a block's tokens, byte for byte: protocol 5 of `pickle.dumps`.
//!
//! The form of `(previous, tokens, None)`, where pickle memoises bytes and tuples but no integers:
//!
//! ```text
//! 80 05                         PROTO 5
//! 95 <8 bytes>                  FRAME: the number of bytes that follow
//! 43 20 <32 bytes> 94           the previous digest, SHORT_BINBYTES; MEMOIZE
//! 28 <integers> 74 94           the tokens, MARK and TUPLE; MEMOIZE
//!    <integers> 85 94           up to three: TUPLE1, TUPLE2 (86) or TUPLE3 (87) without a MARK
//! 4e 87 94 2e                   None; TUPLE3; MEMOIZE; STOP
//! ```
//!
//! Pickle ends a frame at 64 KiB. The callers stay below that ([`MAX_TOKENS`], [`MAX_TEXT_BYTES`]).

use crate::integers::{self, Form};

/// The most tokens of a block whose pickle surely fits one frame.
pub(crate) const MAX_TOKENS: usize = (FRAME_BYTES - OTHER_BYTES) / MAX_INTEGER_BYTES;

/// The longest text whose pickle fits one frame.
pub(crate) const MAX_TEXT_BYTES: usize = FRAME_BYTES - OTHER_BYTES;

/// The size at which pickle ends a frame.
const FRAME_BYTES: usize = 64 << 10;
/// At least as many bytes as a block's pickle has besides its integers.
const OTHER_BYTES: usize = 64;
/// LONG1, the number of bytes, and nine bytes of 2^63.
const MAX_INTEGER_BYTES: usize = 11;

/// PROTO, FRAME and the frame's length.
const HEAD_BYTES: usize = 11;
/// Where a block has the previous digest.
pub(crate) const PREVIOUS: usize = HEAD_BYTES + 2;

const DIGEST_BYTES: usize = 32;

const MEMOIZE: u8 = 0x94;
const STOP: u8 = b'.';
const TUPLE: [u8; 3] = [0x85, 0x86, 0x87];

/// The bytes that [`write_block`] may touch, for so many tokens.
pub(crate) const fn max_bytes(num_tokens: usize) -> usize {
    integers::max_bytes(num_tokens) + OTHER_BYTES
}

/// Writes the pickle of `(previous, tokens, None)` into [`max_bytes`] bytes, and returns its length.
/// Leaves out the previous digest, whose place is [`PREVIOUS`]. There is at least one token.
#[expect(clippy::inline_always, reason = "the number of tokens is often a constant")]
#[inline(always)]
pub(crate) fn write_block(message: &mut [u8], tokens: &[u64]) -> usize {
    write(message, HEAD_BYTES, b"C\x20");
    let mut end = write(message, PREVIOUS + DIGEST_BYTES, &[MEMOIZE]);
    if let Some(short_tuple) = TUPLE.get(tokens.len() - 1) {
        end = integers::write::<Pickle>(message, end, tokens);
        end = write(message, end, &[*short_tuple]);
    } else {
        end = write(message, end, b"(");
        end = integers::write::<Pickle>(message, end, tokens);
        end = write(message, end, b"t");
    }
    end = write(message, end, &[MEMOIZE, b'N', TUPLE[2], MEMOIZE, STOP]);
    write_head(message, end);
    end
}

/// Writes bytes at `end`. Returns their end.
#[inline]
fn write<const N: usize>(message: &mut [u8], end: usize, bytes: &[u8; N]) -> usize {
    if let Some(place) = message.get_mut(end..end + N) {
        place.copy_from_slice(bytes);
    }
    end + N
}

/// The pickle of a text.
pub(crate) fn of_text(text: &str) -> Vec<u8> {
    let mut message = vec![0; HEAD_BYTES];
    if let Ok(num_bytes) = u8::try_from(text.len()) {
        message.extend_from_slice(&[0x8c, num_bytes]); // SHORT_BINUNICODE
    } else {
        message.push(b'X'); // BINUNICODE
        message.extend_from_slice(&text.len().to_le_bytes()[..4]);
    }
    message.extend_from_slice(text.as_bytes());
    message.extend_from_slice(&[MEMOIZE, STOP]);
    let end = message.len();
    write_head(&mut message, end);
    message
}

/// PROTO, and a FRAME of all that follows up to `end`.
fn write_head(message: &mut [u8], end: usize) {
    if let Some(head) = message.first_chunk_mut::<HEAD_BYTES>() {
        head[..3].copy_from_slice(&[0x80, 5, 0x95]);
        head[3..].copy_from_slice(&((end - HEAD_BYTES) as u64).to_le_bytes());
    }
}

/// The encoding of [`Form`]: BININT1, BININT2, BININT, or LONG1 above 2^31 - 1.
struct Pickle;

/// How to write an integer of at most 31 bits, by the position of its highest bit.
struct Short {
    head: [u64; 64],
    num_bytes: [usize; 64],
}

static SHORT: Short = {
    let mut short = Short { head: [0; 64], num_bytes: [0; 64] };
    let mut bit = 0;
    while bit < 31 {
        (short.head[bit], short.num_bytes[bit]) = match bit {
            ..8 => (b'K' as u64, 2),
            8..16 => (b'M' as u64, 3),
            _ => (b'J' as u64, 5),
        };
        bit += 1;
    }
    short
};

impl Form for Pickle {
    const MAX_SHORT: u64 = 0x7fff_ffff;

    #[inline]
    fn short(integer: u64) -> ([u8; 8], usize) {
        let bit = (integer | 1).ilog2() as usize;
        let word = integer << 8 | SHORT.head[bit];
        (word.to_le_bytes(), SHORT.num_bytes[bit])
    }

    fn wide(integer: u64) -> ([u8; 11], usize) {
        let [b0, b1, b2, b3, b4, b5, b6, b7] = integer.to_le_bytes();
        match integer {
            0..0x100 => ([b'K', b0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 2),
            0x100..0x1_0000 => ([b'M', b0, b1, 0, 0, 0, 0, 0, 0, 0, 0], 3),
            0x1_0000..0x8000_0000 => ([b'J', b0, b1, b2, b3, 0, 0, 0, 0, 0, 0], 5),
            _ => {
                // The highest bit is the sign, so 32 bits take five bytes.
                let num_bytes = (u64::BITS - integer.leading_zeros()).to_le_bytes()[0] / 8 + 1;
                let long = [0x8a, num_bytes, b0, b1, b2, b3, b4, b5, b6, b7, 0];
                (long, 2 + usize::from(num_bytes))
            }
        }
    }
}
