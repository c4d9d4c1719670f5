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

/// The digest of `message`, to which this appends SHA-256's padding: a bit, zeros, and the length.
pub(crate) fn digest(message: &mut Vec<u8>) -> [u8; 32] {
    let num_bits = 8 * message.len() as u64;
    message.push(0x80);
    let num_blocks = (message.len() + 8).div_ceil(BLOCK_BYTES);
    message.resize(num_blocks * BLOCK_BYTES - 8, 0);
    message.extend_from_slice(&num_bits.to_be_bytes());

    let mut state = START;
    compress256(&mut state, message.as_chunks().0);
    let mut digest = [0; 32];
    for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(state) {
        *bytes = word.to_be_bytes();
    }
    digest
}
