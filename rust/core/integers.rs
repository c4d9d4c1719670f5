//! Token ids in the shortest forms of CBOR and of pickle.
//!
//! The length of a token id is as random as the id, so branch prediction fails. It is faster to
//! write as many bytes as the longest form has, and to keep those that count.

/// An encoding of integers.
pub(crate) trait Form {
    /// The largest integer that [`Form::short`] takes.
    const MAX_SHORT: u64;

    /// A word whose first bytes are the form of a small integer, and their number.
    fn short(integer: u64) -> ([u8; SHORT_BYTES], usize);

    /// As [`Form::short`], for any integer.
    fn wide(integer: u64) -> ([u8; WIDE_BYTES], usize);
}

const SHORT_BYTES: usize = 8;
const WIDE_BYTES: usize = 11;
/// More bytes than eight small integers have.
const MOST_BYTES: usize = 64;

/// The bytes that [`write`] may touch, for so many integers.
pub(crate) const fn max_bytes(num_integers: usize) -> usize {
    WIDE_BYTES * num_integers + MOST_BYTES + SHORT_BYTES
}

/// Writes integers at `end`, in [`max_bytes`] bytes. Returns their end.
#[expect(clippy::inline_always, reason = "the number of integers is often a constant")]
#[inline(always)]
pub(crate) fn write<F: Form>(message: &mut [u8], mut end: usize, integers: &[u64]) -> usize {
    let (eights, rest) = integers.as_chunks::<8>();
    for eight in eights {
        end += write_some::<F>(&mut message[end..], eight); // the compiler unrolls its loop
    }
    end + write_some::<F>(&mut message[end..], rest)
}

/// Writes at most eight integers at the start of `place`. Returns the number of bytes.
#[expect(clippy::inline_always, reason = "as for its caller")]
#[inline(always)]
fn write_some<F: Form>(place: &mut [u8], integers: &[u64]) -> usize {
    let any_bits = integers.iter().fold(0, |bits, integer| bits | integer);
    // A place of constant length, so that no single integer needs a check of its bounds.
    let short = place.first_chunk_mut::<{ MOST_BYTES + SHORT_BYTES }>();
    let Some(place) = short.filter(|_| any_bits <= F::MAX_SHORT) else {
        return write_wide::<F>(place, integers);
    };
    integers.iter().fold(0, |end, &integer| {
        let (bytes, num_bytes) = F::short(integer);
        place[end % MOST_BYTES..][..SHORT_BYTES].copy_from_slice(&bytes);
        end + num_bytes
    })
}

#[cold]
fn write_wide<F: Form>(place: &mut [u8], integers: &[u64]) -> usize {
    integers.iter().fold(0, |end, &integer| {
        let (bytes, num_bytes) = F::wide(integer);
        place[end..end + WIDE_BYTES].copy_from_slice(&bytes);
        end + num_bytes
    })
}
