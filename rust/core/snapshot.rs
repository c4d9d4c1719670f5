//! Snapshots: a ledger or a scheduler as bytes, and back.
//!
//! May import: error, ledger, offload.
//!
//! ```text
//!   magic  kind  version  length of the body  checksum  |  body
//!   4      2     2        8                   8         |  CBOR, fields by number
//! ```
//!
//! Numbers are little endian. The checksum is XXH3 (64 bits) of all other bytes. A reader trusts
//! nothing in a snapshot: it reserves no memory for a length, compares every index with its bound,
//! and calls `check` on the result. A new field takes a new number. Any other change of a body's
//! meaning needs a new version, and a reader refuses versions that it does not know.

use minicbor::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::{Error, Result};
use crate::ledger::{BlockLedger, LedgerRecord, NewIds, Restored, damaged};
use crate::offload::{OffloadScheduler, SchedulerRecord};

/// The version of snapshots that this kvstow writes, and the only one that it reads.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"KVST";
const LEDGER: u16 = 1;
const SCHEDULER: u16 = 2;
/// Magic, kind, version and length. The checksum follows.
const PREFIX_BYTES: usize = 16;
const HEADER_BYTES: usize = 24;

impl BlockLedger {
    /// The ledger as bytes: its requests, their tables up to the granted tokens, and the keys of
    /// the blocks in these tables. Leaves out pins, lookahead, events, and keys of blocks without
    /// references. Without blocks, requests are as if they had never got slots.
    pub fn snapshot(&self, with_blocks: bool) -> Vec<u8> {
        sealed(LEDGER, &self.to_record(with_blocks))
    }

    /// Fills this ledger, which must be new, from a snapshot. `ids` chooses the new ids of its
    /// blocks. A ledger without events ignores tokens and extra keys.
    ///
    /// # Errors
    /// [`Error::Snapshot`] for bytes that are not a snapshot of a ledger with these groups;
    /// [`Error::State`] if this ledger is not new; [`Error::SmallPool`] if its pool is too small;
    /// [`Error::Config`], [`Error::NoSuchBlock`] or [`Error::InvalidBlock`] for impossible ids.
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
    /// The scheduler as bytes: the tier with its eviction order, the requests, the sleep image.
    /// Jobs, in quarantine or not, count as failed. What lookups hold counts as released.
    ///
    /// # Errors
    /// [`Error::Broken`] for a defect of kvstow.
    pub fn snapshot(&self) -> Result<Vec<u8>> {
        Ok(sealed(SCHEDULER, &self.to_record()?))
    }

    /// Fills this scheduler, which must be new, from a snapshot. It knows no device blocks, so
    /// report whole tables to [`store`](Self::store).
    ///
    /// # Errors
    /// [`Error::Snapshot`] for bytes that are not a snapshot of a scheduler with this size, these
    /// groups, this mode and this policy; [`Error::State`] if this scheduler is not new.
    pub fn restore(self, snapshot: &[u8]) -> Result<Self> {
        if !self.is_new() {
            return Err(Error::State(
                "this scheduler is not new: restore the snapshot into a new one".to_owned(),
            ));
        }
        let mut filled = self.fill(opened::<SchedulerRecord>(SCHEDULER, snapshot)?)?;
        filled.report_empty_disk();
        Ok(filled)
    }
}

fn sealed(kind: u16, record: &impl Encode<()>) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    let written = minicbor::encode(record, &mut bytes);
    debug_assert!(written.is_ok(), "writing to a vector does not fail");
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
        return refused(format!(
            "{} bytes are not a kvstow snapshot: they are shorter than its header",
            bytes.len()
        ));
    };
    let number = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    if header[..4] != MAGIC {
        return refused("the bytes are not a kvstow snapshot: their magic differs".to_owned());
    }
    let version = number(6);
    if version != VERSION {
        return refused(format!(
            "the snapshot has version {version}, this kvstow reads version {VERSION}: use the \
             kvstow that wrote it"
        ));
    }
    if header[16..] != checksum(&header[..PREFIX_BYTES], body).to_le_bytes() {
        return damaged("its checksum does not match, so it is truncated or bytes have changed");
    }
    if number(4) != kind {
        return refused(format!(
            "the snapshot has kind {}, not {kind}: a ledger has {LEDGER}, a scheduler {SCHEDULER}",
            number(4)
        ));
    }
    let mut decoder = minicbor::Decoder::new(body);
    match decoder.decode() {
        Ok(record) if decoder.position() == body.len() => Ok(record),
        Ok(_) => damaged("bytes follow its end"),
        Err(error) => damaged(&error.to_string()),
    }
}

fn checksum(prefix: &[u8], body: &[u8]) -> u64 {
    xxh3_64_with_seed(body, xxh3_64_with_seed(prefix, 0))
}
