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

const MEMOIZE: u8 = 0x94;
const STOP: u8 = b'.';
const TUPLE: [u8; 3] = [0x85, 0x86, 0x87];

/// Replaces `message` with the pickle of `(previous, tokens, None)`. `previous` has at most 255
/// bytes, and there is at least one token.
pub(crate) fn write_block(message: &mut Vec<u8>, previous: &[u8], tokens: &[u64]) {
    begin(message);
    message.extend_from_slice(&[b'C', length_byte(previous)]);
    message.extend_from_slice(previous);
    message.push(MEMOIZE);
    if let Some(short_tuple) = TUPLE.get(tokens.len() - 1) {
        push_integers(message, tokens);
        message.push(*short_tuple);
    } else {
        message.push(b'(');
        push_integers(message, tokens);
        message.push(b't');
    }
    message.extend_from_slice(&[MEMOIZE, b'N', TUPLE[2], MEMOIZE, STOP]);
    end(message);
}

/// Replaces `message` with the pickle of a text.
pub(crate) fn write_text(message: &mut Vec<u8>, text: &str) {
    begin(message);
    if let Ok(num_bytes) = u8::try_from(text.len()) {
        message.extend_from_slice(&[0x8c, num_bytes]); // SHORT_BINUNICODE
    } else {
        message.push(b'X'); // BINUNICODE
        message.extend_from_slice(&text.len().to_le_bytes()[..4]);
    }
    message.extend_from_slice(text.as_bytes());
    message.extend_from_slice(&[MEMOIZE, STOP]);
    end(message);
}

/// PROTO, and a FRAME whose length is not known yet.
fn begin(message: &mut Vec<u8>) {
    message.clear();
    message.extend_from_slice(&[0x80, 5, 0x95, 0, 0, 0, 0, 0, 0, 0, 0]);
}

fn end(message: &mut [u8]) {
    if let Some((head, frame)) = message.split_first_chunk_mut::<11>() {
        head[3..].copy_from_slice(&(frame.len() as u64).to_le_bytes());
    }
}

fn length_byte(bytes: &[u8]) -> u8 {
    u8::try_from(bytes.len()).unwrap_or(u8::MAX)
}

/// Appends integers: BININT1, BININT2, BININT, or LONG1 above 2^31 - 1. As in CBOR, the length of a
/// token id is as random as the id, so the first three are written without a branch.
fn push_integers(message: &mut Vec<u8>, tokens: &[u64]) {
    let mut end = message.len();
    message.resize(end + MAX_INTEGER_BYTES * tokens.len(), 0);
    for token in tokens {
        let bytes = token.to_le_bytes();
        if *token <= 0x7fff_ffff {
            let in_two = usize::from(*token > 0xff);
            let in_four = usize::from(*token > 0xffff);
            if let Some([opcode, body @ ..]) = message.get_mut(end..end + 5) {
                *opcode = [b'K', b'M', b'J'][in_two + in_four];
                body.copy_from_slice(&bytes[..4]);
            }
            end += 2 + in_two + 2 * in_four;
        } else {
            // The highest bit is the sign, so 32 bits take five bytes.
            let num_bytes = (u64::BITS - token.leading_zeros()).to_le_bytes()[0] / 8 + 1;
            if let Some([opcode, length, body @ ..]) = message.get_mut(end..end + MAX_INTEGER_BYTES)
            {
                (*opcode, *length) = (0x8a, num_bytes);
                body[..8].copy_from_slice(&bytes);
                body[8] = 0;
            }
            end += 2 + usize::from(num_bytes);
        }
    }
    message.truncate(end);
}
