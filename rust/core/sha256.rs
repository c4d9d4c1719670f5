//! SHA-256 of a short message in one call, which `sha2::Digest` does in two or three.

use sha2::block_api::compress256;

const BLOCK_BYTES: usize = 64;
/// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
const START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// The bytes that padding may take.
pub(crate) const MAX_PADDING_BYTES: usize = BLOCK_BYTES + 8;

/// The digest of the first `num_bytes` of `message`. After them this writes SHA-256's padding: a
/// bit, zeros, and the length, in at most [`MAX_PADDING_BYTES`].
#[inline]
pub(crate) fn digest(message: &mut [u8], num_bytes: usize) -> [u8; 32] {
    let padded_bytes = (num_bytes + 9).next_multiple_of(BLOCK_BYTES);
    // A fill of constant length is no call, so these are the most zeros that padding has.
    if let Some(zeros) = message[num_bytes..].first_chunk_mut() {
        *zeros = [0; BLOCK_BYTES];
        zeros[0] = 0x80;
    }
    let message = &mut message[..padded_bytes];
    let num_bits = 8 * num_bytes as u64;
    if let Some(length) = message.last_chunk_mut() {
        *length = num_bits.to_be_bytes();
    }

    let mut state = START;
    compress256(&mut state, message.as_chunks().0);
    let mut digest = [0; 32];
    for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(state) {
        *bytes = word.to_be_bytes();
    }
    digest
}
