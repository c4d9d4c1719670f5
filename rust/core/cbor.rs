//! Integers in CBOR, in their shortest forms, as `minicbor::Encoder::u64` writes them.
//!
//! The length of a token id is as random as the id, so branch prediction fails. It is faster to
//! write as many bytes as the longest form has, and to keep those that count.

/// The longest form of any integer.
const MAX_WIDE_BYTES: usize = 9;
const WORD_BYTES: usize = 8;

/// How to write an integer of at most 32 bits as a big-endian word whose first bytes count.
#[derive(Clone, Copy)]
struct Form {
    /// Moves the integer behind the head. A product is faster than a shift by a variable.
    factor: u64,
    /// The head, in the first byte. 0 if the integer itself is the head.
    head: u64,
    num_bytes: usize,
}

/// By the number of leading zeros of an integer in which bit 5 is set from 24 on.
static FORMS: [Form; 64] = {
    let mut forms = [Form { factor: 1 << 24, head: 26 << 56, num_bytes: 5 }; 64];
    let mut zeros = 64 - 16;
    while zeros < 64 {
        forms[zeros] = match 64 - zeros {
            ..=5 => Form { factor: 1 << 56, head: 0, num_bytes: 1 },
            6..=8 => Form { factor: 1 << 48, head: 24 << 56, num_bytes: 2 },
            _ => Form { factor: 1 << 40, head: 25 << 56, num_bytes: 3 },
        };
        zeros += 1;
    }
    forms
};

/// The bytes that [`write_integers`] may touch, for so many integers.
pub(crate) const fn max_bytes(num_integers: usize) -> usize {
    MAX_WIDE_BYTES * num_integers + WORD_BYTES
}

/// Writes integers at `end`, in [`max_bytes`] bytes. Returns their end.
pub(crate) fn write_integers(message: &mut [u8], mut end: usize, integers: &[u64]) -> usize {
    let (eights, rest) = integers.as_chunks::<8>();
    for eight in eights {
        end = write_some(message, end, eight); // the compiler unrolls its loop
    }
    write_some(message, end, rest)
}

#[inline]
fn write_some<T>(message: &mut [u8], mut end: usize, integers: &T) -> usize
where
    T: AsRef<[u64]> + ?Sized,
{
    let integers = integers.as_ref();
    let any_bits = integers.iter().fold(0, |bits, integer| bits | integer);
    if any_bits > u32::MAX.into() {
        return write_wide(message, end, integers);
    }
    for integer in integers {
        // 24 to 31 take a byte more than 16 to 23, which have as many leading zeros.
        let key = integer | ((integer + 8) & 32) | 1;
        let form = FORMS[key.leading_zeros() as usize & 63];
        let word = integer.wrapping_mul(form.factor) | form.head;
        if let Some(place) = message.get_mut(end..end + WORD_BYTES) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        end += form.num_bytes;
    }
    end
}

/// As [`write_integers`], for integers of up to 64 bits.
fn write_wide(message: &mut [u8], mut end: usize, integers: &[u64]) -> usize {
    for integer in integers {
        let steps = [23, 0xff, 0xffff, 0xffff_ffff].map(|most| u8::from(*integer > most));
        let [in_body, in_two, in_four, in_eight] = steps;
        let body_bytes = usize::from(in_body + in_two + 2 * in_four + 4 * in_eight);
        let [.., low_byte] = integer.to_be_bytes();
        let head = if in_body == 0 { low_byte } else { 23 + steps.iter().sum::<u8>() };
        let body = integer << ((64 - 8 * body_bytes) % 64); // its first bytes count
        if let Some([first, rest @ ..]) = message.get_mut(end..end + MAX_WIDE_BYTES) {
            *first = head;
            rest.copy_from_slice(&body.to_be_bytes());
        }
        end += 1 + body_bytes;
    }
    end
}
