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
/// Short integers are written as words.
const WORD_BYTES: usize = 8;

const MEMOIZE: u8 = 0x94;
const STOP: u8 = b'.';
const TUPLE: [u8; 3] = [0x85, 0x86, 0x87];

/// The bytes that [`write_block`] may touch, for so many tokens.
pub(crate) const fn max_bytes(num_tokens: usize) -> usize {
    MAX_INTEGER_BYTES * num_tokens + OTHER_BYTES + WORD_BYTES
}

/// Writes the pickle of `(previous, tokens, None)` into [`max_bytes`] bytes, and returns its length.
/// There is at least one token.
#[inline]
pub(crate) fn write_block(message: &mut [u8], previous: &[u8; 32], tokens: &[u64]) -> usize {
    let mut end = write(message, HEAD_BYTES, b"C\x20");
    end = write(message, end, previous);
    end = write(message, end, &[MEMOIZE]);
    if let Some(short_tuple) = TUPLE.get(tokens.len() - 1) {
        end = write_integers(message, end, tokens);
        end = write(message, end, &[*short_tuple]);
    } else {
        end = write(message, end, b"(");
        end = write_integers(message, end, tokens);
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

/// Writes integers at `end`: BININT1, BININT2, BININT, or LONG1 above 2^31 - 1. Returns their end.
fn write_integers(message: &mut [u8], mut end: usize, integers: &[u64]) -> usize {
    let (eights, rest) = integers.as_chunks::<8>();
    for eight in eights {
        end = write_some(message, end, eight); // the compiler unrolls its loop
    }
    write_some(message, end, rest)
}

/// As in CBOR (see `cbor`), writes the first three kinds without a branch.
#[inline]
fn write_some<T>(message: &mut [u8], mut end: usize, integers: &T) -> usize
where
    T: AsRef<[u64]> + ?Sized,
{
    let integers = integers.as_ref();
    let any_bits = integers.iter().fold(0, |bits, integer| bits | integer);
    if any_bits > 0x7fff_ffff {
        return write_wide(message, end, integers);
    }
    for integer in integers {
        let in_two = usize::from(*integer > 0xff);
        let in_four = usize::from(*integer > 0xffff);
        let word = integer << 8 | u64::from([b'K', b'M', b'J'][in_two + in_four]);
        end = write(message, end, &word.to_le_bytes()) - 6 + in_two + 2 * in_four;
    }
    end
}

fn write_wide(message: &mut [u8], mut end: usize, integers: &[u64]) -> usize {
    for integer in integers {
        let [b0, b1, b2, b3, b4, b5, b6, b7] = integer.to_le_bytes();
        end = match *integer {
            0..=0xff => write(message, end, &[b'K', b0]),
            0x100..=0xffff => write(message, end, &[b'M', b0, b1]),
            0x1_0000..=0x7fff_ffff => write(message, end, &[b'J', b0, b1, b2, b3]),
            _ => {
                // The highest bit is the sign, so 32 bits take five bytes.
                let num_bytes = (u64::BITS - integer.leading_zeros()).to_le_bytes()[0] / 8 + 1;
                let long = [0x8a, num_bytes, b0, b1, b2, b3, b4, b5, b6, b7, 0];
                write(message, end, &long) - 9 + usize::from(num_bytes)
            }
        };
    }
    end
}
