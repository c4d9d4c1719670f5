//! `kvstow._core`: the accounting core as a Python extension module.
//!
//! The classes are thin and frozen. Each method converts its arguments, locks, calls the core, and
//! converts the result. No method touches a Python object while it holds the lock of a core object.
//! Long work runs without the interpreter lock (`lock.rs`).
//!
//! May import: kvstow_core, kvstow_copy.

#![expect(clippy::doc_markdown, reason = "doc comments are docstrings: Python's help shows them")]
#![expect(clippy::needless_pass_by_value, reason = "pyo3 hands extracted arguments over by value")]

mod checksum;
mod convert;
mod copy;
mod curve;
mod error;
mod event;
mod group;
mod hash;
mod hashes;
mod job;
mod ledger;
mod lock;
mod offload;
mod pickled;
mod pool;

/// The accounting core, in Rust. Import these names from `kvstow`, not from here.
///
/// Ids come out as `int32` arrays and go in as any sequence of ints or any integer array. A hash is
/// `bytes`, 1 to 32 long, one width per object. Every operation is all or nothing: one that raises
/// has changed nothing.
#[pyo3::pymodule]
mod _core {
    use numpy::{IntoPyArray, PyArrayMethods};
    use pyo3::prelude::{Bound, PyAnyMethods, PyModule, PyResult};

    /// Register `Hashes` as a sequence, and what forks wait for. Load what rust-numpy loads at its
    /// first use, because an interrupt at that moment is a panic.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        // This call returns its error if numpy is missing or the import is interrupted.
        py.import("numpy.lib")?.getattr("NumpyVersion")?;
        Vec::<i32>::new().into_pyarray(py).readonly();
        super::lock::hold_forks(py)?;
        super::hashes::register(py)
    }

    #[pymodule_export]
    use super::checksum::{row_checksums, row_digests};
    #[pymodule_export]
    use super::copy::BlockCopier;
    #[pymodule_export]
    use super::curve::{HitCurve, clairvoyant_hits, salted_ids};
    #[pymodule_export]
    use super::error::{
        ChecksumMismatch, ConfigError, InvalidBlock, KvstowError, OutOfBlocks, RequestTooLarge,
        SnapshotError, StateError, TransferError, UnknownRequest,
    };
    #[pymodule_export]
    use super::event::{AllBlocksCleared, BlockRemoved, BlockStored};
    #[pymodule_export]
    use super::group::{ChunkedLocal, FullAttention, SlidingWindow, StateSpace};
    #[pymodule_export]
    use super::hash::hash_tokens;
    #[pymodule_export]
    use super::hashes::Hashes;
    #[pymodule_export]
    use super::job::{
        CacheStoreCommitted, Job, JobEnd, TierJob, TransferCompleted, TransferInitiated,
    };
    #[pymodule_export]
    use super::ledger::{BlockLedger, PrefixHit, StepAllocation};
    #[pymodule_export]
    use super::offload::OffloadScheduler;
    #[pymodule_export]
    use super::pool::{BlockPool, LedgerPool};

    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "a Python name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// Whether the binary was built without optimisation.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "a Python name")]
    const debug_build: bool = cfg!(debug_assertions);
}
