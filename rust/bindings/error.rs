//! Python's exceptions, and the exception for each core error.

use kvstow_core::error::Error;
use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::PyException;

/// Defines each exception of `kvstow`, with its base and its docstring.
macro_rules! exceptions {
    ($($name:ident($base:ident): $doc:literal;)+) => {
        $(create_exception!(kvstow, $name, $base, $doc);)+
    };
}

exceptions! {
    KvstowError(PyException): "The base of every error that this library raises on purpose.";
    ConfigError(KvstowError): "A size, option or argument that can never be right.";
    OutOfBlocks(KvstowError): "An allocation that the pool cannot serve.";
    RequestTooLarge(OutOfBlocks):
        "A request that can never run, because it needs more blocks than the whole pool has.";
    InvalidBlock(KvstowError):
        "A block id outside the pool, or a block whose state forbids the operation.";
    UnknownRequest(KvstowError): "A request that was never added, or that was freed.";
    StateError(KvstowError): "An operation that comes at the wrong moment.";
    TransferError(KvstowError): "A store or load that failed.";
    ChecksumMismatch(TransferError): "A loaded block whose bytes differ from the stored bytes.";
    SnapshotError(KvstowError): "A snapshot that is damaged, truncated or foreign.";
}

/// The Python exception for a core error.
pub(crate) fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Config(_) | Error::HashWidth { .. } => ConfigError::new_err(message),
        Error::OutOfBlocks { .. } | Error::SmallPool { .. } | Error::NoRoomForImage { .. } => {
            OutOfBlocks::new_err(message)
        }
        Error::Snapshot(_) => SnapshotError::new_err(message),
        Error::NoSuchBlock { .. } | Error::InvalidBlock { .. } => InvalidBlock::new_err(message),
        Error::UnknownRequest { .. } => UnknownRequest::new_err(message),
        _ => StateError::new_err(message),
    }
}
