//! Python's exceptions, and the exception for each core error.

use kvstow_core::error::Error;
use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::PyException;

create_exception!(
    kvstow,
    KvstowError,
    PyException,
    "The base of every error that this library raises on purpose."
);
create_exception!(
    kvstow,
    ConfigError,
    KvstowError,
    "A size, option or argument that can never be right."
);
create_exception!(kvstow, OutOfBlocks, KvstowError, "An allocation that the pool cannot serve.");
create_exception!(
    kvstow,
    InvalidBlock,
    KvstowError,
    "A block id outside the pool, or a block whose state forbids the operation."
);
create_exception!(
    kvstow,
    UnknownRequest,
    KvstowError,
    "A request that was never added, or that was freed."
);
create_exception!(kvstow, StateError, KvstowError, "An operation that comes at the wrong moment.");
create_exception!(kvstow, TransferError, KvstowError, "A store or load that failed.");
create_exception!(
    kvstow,
    ChecksumMismatch,
    TransferError,
    "A loaded block whose bytes differ from the stored bytes."
);
create_exception!(
    kvstow,
    SnapshotError,
    KvstowError,
    "A snapshot that is damaged, truncated or foreign."
);

/// The Python exception for a core error.
pub(crate) fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Config(_) | Error::HashWidth { .. } => ConfigError::new_err(message),
        Error::OutOfBlocks { .. } | Error::NoRoomForImage { .. } => OutOfBlocks::new_err(message),
        Error::Snapshot(_) => SnapshotError::new_err(message),
        Error::NoSuchBlock { .. } | Error::InvalidBlock { .. } => InvalidBlock::new_err(message),
        Error::UnknownRequest { .. } => UnknownRequest::new_err(message),
        _ => StateError::new_err(message),
    }
}
