//! One copy of contiguous bytes, with stores that bypass the caches if the target is large.
//!
//! A plain store first reads the line that it overwrites, and it evicts a line that the engine may
//! need. A streaming store writes whole lines to memory. Two streams at once use two of the
//! processor's prefetchers, and so read faster than one.

use std::ptr;

/// Whether this processor has them. Miri has not, but checks the code around them.
const HAS_STREAMING_STORES: bool = cfg!(any(target_arch = "x86_64", miri));
/// Bytes that the processor moves between cache and memory at once.
const LINE_BYTES: usize = 64;
/// Shorter copies take plain stores: most of their lines are not whole.
const MIN_STREAM_BYTES: usize = 256;
/// A prefetcher stays within a page of 4 KiB. In a shorter copy two streams would share one. Miri is
/// too slow for such sizes.
const MIN_TWO_STREAMS_BYTES: usize = if cfg!(miri) { 512 } else { 8192 };

/// Copies `num_bytes`. [`fence`] must come before another thread reads the target.
///
/// # Safety
///
/// `source` may be read and `target` written for `num_bytes`, and the two do not overlap.
pub(crate) unsafe fn stream(target: *mut u8, source: *const u8, num_bytes: usize) {
    let head = target.align_offset(LINE_BYTES);
    if !HAS_STREAMING_STORES || num_bytes < MIN_STREAM_BYTES || head > num_bytes {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(source, target, num_bytes) };
        return;
    }
    let num_streams = if num_bytes < MIN_TWO_STREAMS_BYTES { 1 } else { 2 };
    // What one stream copies, in whole lines.
    let body = (num_bytes - head) / num_streams / LINE_BYTES * LINE_BYTES;
    // SAFETY: `head` is at most `num_bytes`.
    unsafe { ptr::copy_nonoverlapping(source, target, head) };
    for at in (head..head + body).step_by(LINE_BYTES) {
        // SAFETY: the line ends within `head + body`, and `head` has aligned the target.
        unsafe { stream_line(target, source, at) };
        if num_streams == 2 {
            // SAFETY: the line ends within `head + 2 * body`, and `body` is whole lines.
            unsafe { stream_line(target, source, at + body) };
        }
    }
    let end = head + num_streams * body;
    // SAFETY: `end` is at most `num_bytes`.
    let source = unsafe { source.add(end) };
    // SAFETY: `end` is at most `num_bytes`.
    let target = unsafe { target.add(end) };
    // SAFETY: the rest of what the caller promises.
    unsafe { ptr::copy_nonoverlapping(source, target, num_bytes - end) };
}

/// Copies the 64 bytes from `at`.
///
/// # Safety
///
/// They may be read and written, do not overlap, and the target's are aligned to 64.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
#[expect(clippy::cast_ptr_alignment, reason = "the caller aligns the target; the load needs none")]
unsafe fn stream_line(target: *mut u8, source: *const u8, at: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    for part in [0, 16, 32, 48] {
        // SAFETY: within the line.
        let from = unsafe { source.add(at + part) }.cast::<__m128i>();
        // SAFETY: within the line.
        let to = unsafe { target.add(at + part) }.cast::<__m128i>();
        // SAFETY: the caller's promise. Every x86-64 processor has SSE2.
        let bytes = unsafe { _mm_loadu_si128(from) };
        // SAFETY: the caller's promise, the alignment included.
        unsafe { _mm_stream_si128(to, bytes) };
    }
}

/// Makes all streamed bytes of this thread visible before whatever it writes next.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) fn fence() {
    // SAFETY: every x86-64 processor has SSE.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

/// Copies the 64 bytes from `at`.
///
/// # Safety
///
/// They may be read and written, and do not overlap.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn stream_line(target: *mut u8, source: *const u8, at: usize) {
    // SAFETY: the caller's promise.
    let from = unsafe { source.add(at) };
    // SAFETY: the caller's promise.
    let to = unsafe { target.add(at) };
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, LINE_BYTES) };
}

/// Does nothing: plain stores need no fence.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) fn fence() {}
