//! Random jobs against a model that knows only bytes, and each way in which a job is refused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::Cell;
use std::thread;

use proptest::prelude::*;

use crate::{Error, Pair, Region, Slots, Stores, ThisThread, load, store, store_with_checksums};

/// Cases of the model test. Miri takes seconds for each.
const NUM_CASES: u32 = if cfg!(miri) { 6 } else { 512 };

/// The rows of one region: bytes before row 0, bytes of a row, bytes between two.
type Shape = (usize, usize, usize);

#[derive(Clone, Debug)]
struct Case {
    num_blocks: usize,
    num_slots: usize,
    regions: Vec<Shape>,
    slots: Shape,
    pairs: Vec<Pair>,
    seed: u8,
    is_streaming: bool,
}

/// Sizes around each limit of the streaming copy: a line, its least bytes, two streams, a chunk.
fn row_bytes() -> impl Strategy<Value = usize> {
    let largest = if cfg!(miri) { 700 } else { 40_000 };
    let edges = [1, 63, 64, 65, 255, 256, 300, 600, 4096, 8191, 8192, 8200, 16_384, 16_400, 33_000];
    let edges: Vec<usize> = edges.into_iter().filter(|&edge| edge <= largest).collect();
    prop_oneof![0..largest, prop::sample::select(edges)]
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (0..70_usize, row_bytes(), prop_oneof![Just(0_usize), 0..70_usize]);
    (1..6_usize, 1..6_usize, prop::collection::vec(shape, 1..4)).prop_flat_map(
        |(num_blocks, num_slots, regions)| {
            let pair = (0..num_blocks, 0..num_slots).prop_map(|(block, slot)| Pair { block, slot });
            let slots = (0..70_usize, prop_oneof![Just(0), 0..500_usize], 0..70_usize);
            (prop::collection::vec(pair, 0..9), slots, any::<u8>(), any::<bool>()).prop_map(
                move |(pairs, (before, rest, gap), seed, is_streaming)| {
                    let block_bytes: usize = regions.iter().map(|region| region.1).sum();
                    Case {
                        num_blocks,
                        num_slots,
                        regions: regions.clone(),
                        slots: (before, block_bytes + rest, gap),
                        pairs,
                        seed,
                        is_streaming,
                    }
                },
            )
        },
    )
}

fn noise(num_bytes: usize, seed: u8) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    (0..num_bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56).to_le_bytes()[0]
        })
        .collect()
}

fn memory((before, bytes, gap): Shape, num_rows: usize, seed: u8) -> Vec<u8> {
    noise(before + num_rows * (bytes + gap), seed)
}

/// The first byte of row `i`.
fn start((before, bytes, gap): Shape, row: usize) -> usize {
    before + row * (bytes + gap)
}

fn cells(bytes: &mut [u8]) -> &[Cell<u8>] {
    Cell::from_mut(bytes).as_slice_of_cells()
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Store,
    StoreWithChecksums,
    Load,
}

/// Calls the crate, and returns the sums, or nothing if the call computes none.
fn run(
    case: &Case,
    call: Call,
    blocks: &mut [Vec<u8>],
    arena: &mut [u8],
) -> Result<Vec<u32>, Error> {
    let regions = blocks
        .iter_mut()
        .zip(&case.regions)
        .map(|(bytes, &(before, row_bytes, gap))| {
            Region::new(&cells(bytes)[before..], case.num_blocks, row_bytes + gap, row_bytes)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let (before, slot_bytes, gap) = case.slots;
    let slots = Slots::new(&cells(arena)[before..], case.num_slots, slot_bytes + gap, slot_bytes)?;
    let stores = if case.is_streaming { Stores::Streaming } else { Stores::Plain };
    match call {
        Call::Store => store(&regions, &slots, &case.pairs, stores).map(|()| Vec::new()),
        Call::Load => load(&regions, &slots, &case.pairs, stores).map(|()| Vec::new()),
        Call::StoreWithChecksums => store_with_checksums(&regions, &slots, &case.pairs, stores),
    }
}

/// Does what `run` should do, in safe code.
fn model(case: &Case, call: Call, blocks: &mut [Vec<u8>], arena: &mut [u8]) {
    for pair in &case.pairs {
        let mut in_slot = start(case.slots, pair.slot);
        for (bytes, &shape) in blocks.iter_mut().zip(&case.regions) {
            let in_block = start(shape, pair.block);
            let block = &mut bytes[in_block..in_block + shape.1];
            let part = &mut arena[in_slot..in_slot + shape.1];
            match call {
                Call::Load => block.copy_from_slice(part),
                Call::Store | Call::StoreWithChecksums => part.copy_from_slice(block),
            }
            in_slot += shape.1;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(NUM_CASES) })]

    #[test]
    fn copies_every_byte_to_its_place_and_changes_no_other(case in case()) {
        let mut blocks: Vec<_> =
            case.regions.iter().map(|&shape| memory(shape, case.num_blocks, case.seed)).collect();
        let mut arena = memory(case.slots, case.num_slots, case.seed ^ 0x5a);
        for call in [Call::Store, Call::Load, Call::StoreWithChecksums] {
            // Other bytes on one side, so that the next copy changes something.
            if matches!(call, Call::Load) {
                arena = memory(case.slots, case.num_slots, case.seed ^ 0x33);
            }
            let (mut want_blocks, mut want_arena) = (blocks.clone(), arena.clone());
            model(&case, call, &mut want_blocks, &mut want_arena);
            let sums = run(&case, call, &mut blocks, &mut arena).unwrap();
            prop_assert!(blocks == want_blocks, "{call:?} wrote other bytes to the blocks");
            prop_assert!(arena == want_arena, "{call:?} wrote other bytes to the slots");
            for (&sum, pair) in sums.iter().zip(&case.pairs) {
                // A slot that is stored twice holds the last block, and each sum is its block's own.
                let is_last = case.pairs.iter().rev().find(|it| it.slot == pair.slot) == Some(pair);
                let at = start(case.slots, pair.slot);
                let want = crc32fast::hash(&arena[at..at + case.slots.1]);
                prop_assert!(!is_last || sum == want, "the sum of slot {} differs", pair.slot);
            }
        }
    }
}

/// Two regions of 3 blocks, and 4 slots, all without gaps.
fn small(pairs: Vec<Pair>) -> Case {
    let regions = vec![(0, 8, 0), (0, 5, 0)];
    Case {
        num_blocks: 3,
        num_slots: 4,
        regions,
        slots: (0, 13, 0),
        pairs,
        seed: 1,
        is_streaming: false,
    }
}

/// Runs each call, and returns its error after a look that no byte has changed.
fn refused(case: &Case) -> Error {
    let mut errors = Vec::new();
    for call in [Call::Store, Call::Load, Call::StoreWithChecksums] {
        let mut blocks: Vec<_> = case.regions.iter().map(|_| noise(24, 1)).collect();
        let mut arena = noise(52, 2);
        let before = (blocks.clone(), arena.clone());
        errors.push(run(case, call, &mut blocks, &mut arena).unwrap_err());
        assert_eq!((blocks, arena), before, "{call:?} was refused, and has copied");
    }
    assert!(errors.iter().all(|error| *error == errors[0]));
    errors.remove(0)
}

#[test]
fn refuses_the_first_block_after_the_last_before_it_copies_any() {
    let case = small(vec![Pair { block: 0, slot: 0 }, Pair { block: 3, slot: 1 }]);
    assert_eq!(refused(&case), Error::NoSuchBlock { block: 3, last: 2, region: 0 });
}

#[test]
fn refuses_the_first_slot_after_the_last_before_it_copies_any() {
    let case = small(vec![Pair { block: 1, slot: 0 }, Pair { block: 1, slot: 4 }]);
    assert_eq!(refused(&case), Error::NoSuchSlot { slot: 4, last: 3 });
}

#[test]
fn refuses_ids_whose_address_would_wrap() {
    for (block, slot) in
        [(usize::MAX, 0), (usize::MAX / 8, 0), (0, usize::MAX), (0, usize::MAX / 13)]
    {
        let error = refused(&small(vec![Pair { block, slot }]));
        assert!(matches!(error, Error::NoSuchBlock { .. } | Error::NoSuchSlot { .. }), "{error}");
    }
}

#[test]
fn refuses_a_region_with_fewer_blocks_than_another() {
    let mut long = noise(24, 1);
    let (mut short, mut arena) = (noise(5, 2), noise(52, 3));
    let regions = [
        Region::new(cells(&mut long), 3, 8, 8).unwrap(),
        Region::new(cells(&mut short), 1, 5, 5).unwrap(),
    ];
    let slots = Slots::new(cells(&mut arena), 4, 13, 13).unwrap();
    let error = store(&regions, &slots, &[Pair { block: 1, slot: 0 }], Stores::Plain).unwrap_err();
    assert_eq!(error, Error::NoSuchBlock { block: 1, last: 0, region: 1 });
}

#[test]
fn refuses_rows_that_reach_past_their_memory() {
    let mut bytes = noise(24, 1);
    let memory = cells(&mut bytes);
    assert!(Region::new(memory, 3, 8, 8).is_ok());
    assert!(Region::new(memory, 0, 8, 8).is_ok());
    for (num_rows, stride, row_bytes) in [
        (3, 8, 9),
        (4, 8, 8),
        (3, 9, 8),
        (2, usize::MAX, 1),
        (usize::MAX, 8, 8),
        (1, 8, usize::MAX),
    ] {
        let want = Error::TooLittleMemory { num_rows, stride, row_bytes, memory_bytes: 24 };
        assert_eq!(Region::new(memory, num_rows, stride, row_bytes).err(), Some(want.clone()));
        assert_eq!(Slots::new(memory, num_rows, stride, row_bytes).err(), Some(want));
    }
}

#[test]
fn refuses_rows_that_overlap() {
    let mut bytes = noise(24, 1);
    let memory = cells(&mut bytes);
    for (num_rows, stride, row_bytes) in [(2, 7, 8), (3, 0, 8), (2, 0, 1)] {
        let want = Error::ShortStride { stride, row_bytes };
        assert_eq!(Region::new(memory, num_rows, stride, row_bytes).err(), Some(want.clone()));
        assert_eq!(Slots::new(memory, num_rows, stride, row_bytes).err(), Some(want));
    }
    for (num_rows, stride, row_bytes) in [(1, 0, 8), (3, 0, 0), (3, 8, 8)] {
        assert!(Region::new(memory, num_rows, stride, row_bytes).is_ok());
    }
}

#[test]
fn refuses_slots_smaller_than_a_block() {
    let mut case = small(vec![Pair { block: 0, slot: 0 }]);
    case.slots = (0, 12, 1);
    assert_eq!(refused(&case), Error::SlotTooSmall { block_bytes: 13, slot_bytes: 12 });
}

#[test]
fn refuses_regions_that_share_a_byte_with_the_slots() {
    let mut bytes = noise(64, 1);
    let memory = cells(&mut bytes);
    for (first, last) in [(0, 33), (31, 64), (0, 64)] {
        let regions = [Region::new(&memory[first..last], 1, 8, 8).unwrap()];
        let slots = Slots::new(&memory[32..], 2, 16, 16).unwrap();
        let pairs = [Pair { block: 0, slot: 0 }];
        let is_apart = last <= 32;
        for error in [
            store(&regions, &slots, &pairs, Stores::Plain).err(),
            load(&regions, &slots, &pairs, Stores::Plain).err(),
        ] {
            assert_eq!(error, (!is_apart).then_some(Error::SharedMemory { region: 0 }));
        }
    }
    let apart = [Region::new(&memory[..32], 1, 8, 8).unwrap()];
    let slots = Slots::new(&memory[32..], 2, 16, 16).unwrap();
    assert!(load(&apart, &slots, &[Pair { block: 0, slot: 1 }], Stores::Plain).is_ok());
}

#[test]
fn a_value_is_returned_to_its_own_thread_only() {
    let byte = Cell::new(7_u8);
    let own = ThisThread::new(&byte);
    assert_eq!(own.get().map(Cell::get), Some(7));
    let sent = ThisThread::new(7_u8);
    assert_eq!(thread::spawn(move || sent.get()).join().unwrap(), None);
}
