//! Every interleaving of jobs in four small worlds, with the real scheduler.
//!
//! `world` has the requests and all that can happen, `memory` the copies and what each rank's memory
//! holds, `sleep` the sleep image, `projection` the form in which states repeat, and `explorer` the
//! search. After each step, [`World::check`] verifies the contracts:
//!
//! - What a lookup finds was written whole, by all ranks, since the last reset.
//! - A load delivers the blocks of its request, and a sleep image those of the device.
//! - No job writes what another job, a lookup or the sleep image uses.
//! - A job ends when its last rank has reported, and not before. A late or fenced one never counts,
//!   and its targets lose their keys at once.
//! - Without a job, a request or an image, no slot is in use but those that a lookup finds.
//! - No request waits for ever.
//!
//! `tests/model/seeded_bugs.py` removes one wait, pin or fence at a time from a copy of the
//! scheduler, and the search finds each of these bugs.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![expect(clippy::print_stderr, reason = "a search reports its size")]

mod explorer;
mod memory;
mod projection;
mod sleep;
mod world;

use std::time::Instant;

use explorer::explore;
use world::{Options, World};

const NOTHING: Options = Options {
    num_ranks: 1,
    num_requests: 2,
    num_host: 2,
    num_disk: 0,
    num_device: 4,
    num_jobs: 2,
    num_faults: 0,
    num_damages: 0,
    num_resets: 0,
    can_expire: false,
    can_sleep: false,
    can_stop: false,
};

/// Searches a world, or with `KVSTOW_MODEL=full` a larger one.
fn search(name: &str, in_ci: Options, full: Options) {
    let is_full = std::env::var("KVSTOW_MODEL").is_ok_and(|given| given == "full");
    let began = Instant::now();
    match explore(World::new(if is_full { full } else { in_ci }), 20_000_000) {
        Ok(size) => eprintln!(
            "{name}: {} states, {} transitions, {} steps deep, {:.1} s",
            size.num_states,
            size.num_transitions,
            size.depth,
            began.elapsed().as_secs_f64()
        ),
        Err(found) => {
            let num_steps = found.trace.len();
            panic!("\n{name}: {} after {num_steps} steps: {:?}\n", found.what, found.trace)
        }
    }
}

/// Two ranks: a store counts only if both have copied it, and late copies do no harm.
#[test]
fn ranks() {
    let in_ci = Options {
        num_ranks: 2,
        num_device: 3,
        num_faults: 1,
        num_resets: 1,
        can_expire: true,
        can_stop: true,
        ..NOTHING
    };
    search("ranks", in_ci, Options { num_device: 4, num_jobs: 3, ..in_ci });
}

/// A disk tier: blocks go down and come back, while the host evicts, fails and resets.
#[test]
fn disk() {
    let in_ci = Options {
        num_requests: 1,
        num_disk: 2,
        num_faults: 1,
        num_damages: 1,
        can_expire: true,
        can_stop: true,
        ..NOTHING
    };
    search("disk", in_ci, Options { num_jobs: 3, num_resets: 1, ..in_ci });
}

/// A device that sleeps: its image shares slots with the tier, whatever happens to the tier.
#[test]
fn sleeping() {
    let in_ci = Options { num_host: 4, num_damages: 1, num_resets: 1, can_sleep: true, ..NOTHING };
    search("sleeping", in_ci, Options { num_faults: 1, can_expire: true, ..in_ci });
}

/// Two requests that share the first block of a chain on the disk.
#[test]
fn sharing() {
    let in_ci = Options { num_disk: 2, num_jobs: 1, num_resets: 1, ..NOTHING };
    search("sharing", in_ci, Options { num_jobs: 2, num_faults: 1, num_resets: 0, ..in_ci });
}
