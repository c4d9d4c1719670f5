//! Snapshots: a ledger or a scheduler as bytes, and back.
//!
//! ```text
//!   magic  kind  version  length of the body  checksum  |  body
//!   4      2     2        8                   8         |  CBOR, fields by number
//! ```
//!
//! Numbers are little endian; the checksum is XXH3 (64 bits) of all the rest. What reads one
//! believes nothing in it: lengths set no memory aside, every index is compared with what it indexes,
//! and what was built must pass `check`. A field can be added under a new number; whatever else
//! changes the meaning of a body is a new version, and a reader refuses the versions it does not
//! know.

use minicbor::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::{Error, Result};
use crate::ledger::{BlockLedger, LedgerRecord, NewIds, Restored, damaged};
use crate::offload::{OffloadScheduler, SchedulerRecord};

/// The version of what is written here, and the only one that is read.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"KVST";
const LEDGER: u16 = 1;
const SCHEDULER: u16 = 2;
/// Magic, kind, version and length; the checksum comes after.
const PREFIX_BYTES: usize = 16;
const HEADER_BYTES: usize = 24;

impl BlockLedger {
    /// The ledger as bytes: its requests, their tables up to the granted tokens, and the keys of the
    /// blocks in them. Pins, lookahead, events, and the keys of blocks that nobody references do
    /// not survive. Without blocks, requests are as if they had never been served.
    pub fn snapshot(&self, with_blocks: bool) -> Vec<u8> {
        sealed(LEDGER, &self.to_record(with_blocks))
    }

    /// Fills this ledger, which must be new, from a snapshot; `ids` are those of its blocks here.
    /// Tokens and extra keys are left out where this ledger keeps no events.
    ///
    /// # Errors
    /// [`Error::Snapshot`] for bytes that are none of a ledger of these groups; [`Error::State`] if
    /// this ledger is not new; [`Error::OutOfBlocks`] where its pool is too small, and
    /// [`Error::Config`], [`Error::NoSuchBlock`] or [`Error::InvalidBlock`] for ids that cannot be.
    pub fn restore(self, snapshot: &[u8], ids: NewIds) -> Result<Restored> {
        if !self.is_new() {
            return Err(Error::State(
                "this ledger has served requests: restore the snapshot into a new one".to_owned(),
            ));
        }
        self.fill(opened::<LedgerRecord>(LEDGER, snapshot)?, ids)
    }
}

impl OffloadScheduler {
    /// The scheduler as bytes: the tier with its order of eviction, the requests, the sleep image.
    /// Jobs, in quarantine or not, are left out as if they had failed, and what lookups hold as if
    /// it had been released.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn snapshot(&self) -> Result<Vec<u8>> {
        Ok(sealed(SCHEDULER, &self.to_record()?))
    }

    /// Fills this scheduler, which must be new, from a snapshot. It knows no device blocks: tell
    /// [`store`](Self::store) whole tables.
    ///
    /// # Errors
    /// [`Error::Snapshot`] for bytes that are none of a scheduler of this size, groups, mode and
    /// policy; [`Error::State`] if this scheduler is not new.
    pub fn restore(self, snapshot: &[u8]) -> Result<Self> {
        if !self.is_new() {
            return Err(Error::State("only a new scheduler can be restored".to_owned()));
        }
        self.fill(opened::<SchedulerRecord>(SCHEDULER, snapshot)?)
    }
}

fn sealed(kind: u16, record: &impl Encode<()>) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    let written = minicbor::encode(record, &mut bytes);
    debug_assert!(written.is_ok(), "a vector takes all that is written");
    let num_bytes = (bytes.len() - HEADER_BYTES) as u64;
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&kind.to_le_bytes());
    bytes[6..8].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..PREFIX_BYTES].copy_from_slice(&num_bytes.to_le_bytes());
    let checksum = checksum(&bytes[..PREFIX_BYTES], &bytes[HEADER_BYTES..]);
    bytes[PREFIX_BYTES..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn opened<'a, T: Decode<'a, ()>>(kind: u16, bytes: &'a [u8]) -> Result<T> {
    let refused = |what: String| Err(Error::Snapshot(what));
    let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return refused(format!("{} bytes are no snapshot: the header is longer", bytes.len()));
    };
    let number = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    if header[..4] != MAGIC {
        return refused(
            "this is no snapshot of kvstow's: it begins with something else".to_owned(),
        );
    }
    let version = number(6);
    if version != VERSION {
        return refused(format!(
            "the snapshot is of version {version}, this kvstow reads version {VERSION}: take the \
             kvstow that wrote it"
        ));
    }
    if header[16..] != checksum(&header[..PREFIX_BYTES], body).to_le_bytes() {
        return damaged("its checksum does not match; it was cut off, or bytes have changed");
    }
    if number(4) != kind {
        return refused(format!("a snapshot of kind {} was given for one of {kind}", number(4)));
    }
    let mut decoder = minicbor::Decoder::new(body);
    match decoder.decode() {
        Ok(record) if decoder.position() == body.len() => Ok(record),
        Ok(_) => damaged("something comes after its end"),
        Err(error) => damaged(&error.to_string()),
    }
}

fn checksum(prefix: &[u8], body: &[u8]) -> u64 {
    xxh3_64_with_seed(body, xxh3_64_with_seed(prefix, 0))
}
