//! Integers in CBOR, in their shortest forms, as `minicbor::Encoder::u64` writes them.

use crate::integers::Form;

/// The encoding of [`Form`].
pub(crate) struct Cbor;

/// How to write an integer of at most 32 bits as a big-endian word whose first bytes count, by the
/// position of its highest bit, in which bit 5 is set from 24 on.
struct Short {
    /// Moves the integer behind the head. A product is faster than a shift by a variable.
    factor: [u64; 64],
    /// The head, in the first byte. 0 if the integer itself is the head.
    head: [u64; 64],
    num_bytes: [usize; 64],
}

static SHORT: Short = {
    let mut short = Short { factor: [0; 64], head: [0; 64], num_bytes: [0; 64] };
    let mut bit = 0;
    while bit < 32 {
        (short.factor[bit], short.head[bit], short.num_bytes[bit]) = match bit {
            ..5 => (1 << 56, 0, 1),
            5..8 => (1 << 48, 24 << 56, 2),
            8..16 => (1 << 40, 25 << 56, 3),
            _ => (1 << 24, 26 << 56, 5),
        };
        bit += 1;
    }
    short
};

impl Form for Cbor {
    const MAX_SHORT: u64 = 0xffff_ffff;

    #[inline]
    fn short(integer: u64) -> ([u8; 8], usize) {
        // 24 to 31 take a byte more than 16 to 23, which have the same highest bit.
        let bit = (integer | ((integer + 8) & 32) | 1).ilog2() as usize;
        let word = integer.wrapping_mul(SHORT.factor[bit]) | SHORT.head[bit];
        (word.to_be_bytes(), SHORT.num_bytes[bit])
    }

    fn wide(integer: u64) -> ([u8; 11], usize) {
        let [b0, b1, b2, b3, b4, b5, b6, b7] = integer.to_be_bytes();
        match integer {
            0..24 => ([b7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1),
            24..0x100 => ([24, b7, 0, 0, 0, 0, 0, 0, 0, 0, 0], 2),
            0x100..0x1_0000 => ([25, b6, b7, 0, 0, 0, 0, 0, 0, 0, 0], 3),
            0x1_0000..0x1_0000_0000 => ([26, b4, b5, b6, b7, 0, 0, 0, 0, 0, 0], 5),
            _ => ([27, b0, b1, b2, b3, b4, b5, b6, b7, 0, 0], 9),
        }
    }
}
