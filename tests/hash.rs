//! Block hashes: the answers of vLLM 0.32, the encoding byte by byte, and refused input.
//! `tests/vllm/test_hash.py` compares random cases with vLLM's own functions.

#![expect(clippy::unwrap_used, reason = "a failing test may panic, in its helpers too")]

use kvstow_core::error::Error;
use kvstow_core::hash::{
    Algorithm, BlockExtraKeys, DEFAULT_SEED, ExtraKey, HashOptions, MAX_EXTRA_KEY_DEPTH, MAX_TOKEN,
    hash_tokens,
};
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

const PICKLED: Algorithm = Algorithm::Sha256;
const SHA: Algorithm = Algorithm::Sha256Cbor;
const XXH: Algorithm = Algorithm::XxhashCbor;

fn digests(tokens: &[u64], block_size: usize, options: HashOptions<'_>) -> Vec<Vec<u8>> {
    let hashes = hash_tokens(tokens, block_size, options).unwrap();
    let width = hashes.width();
    hashes.as_slice().iter().map(|hash| width.digest(hash).to_vec()).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<char> = text.chars().filter(|char| !char.is_whitespace()).collect();
    let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn text(value: &str) -> ExtraKey {
    ExtraKey::Text(value.to_owned())
}

/// The extra keys of three blocks: a salt; none; an adapter, an image and embeddings.
fn three_blocks_keys() -> Vec<BlockExtraKeys> {
    use ExtraKey::{Bytes, Int, Sequence};
    vec![
        Some(vec![Sequence(vec![text("cache_salt"), text("s")])]),
        None,
        Some(vec![
            Sequence(vec![text("lora"), text("a"), text("/p")]),
            Sequence(vec![text("mm"), text("id"), Int(-3)]),
            Sequence(vec![text("prompt_embeds"), Bytes(vec![0x00, 0xff])]),
        ]),
    ]
}

#[test]
fn digests_equal_those_of_vllm() {
    let tokens: Vec<u64> = (0..48).collect();
    let keys = three_blocks_keys();
    let cases = [
        (
            HashOptions::default(),
            [
                "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
                "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
                "117dad852830e0103c12d7c7f8b7cf58434ea8751d1f42ee07b1c93711e4da6c",
            ],
        ),
        (
            HashOptions { algorithm: PICKLED, ..Default::default() },
            [
                "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
                "8be7aaa33831156d316f1f463ae57e643deb63f42e633e2d631df88815cc4629",
                "9d537f74907f6ada2b6cccb46b9845df2ebdbaf60c73d8679cf1da81b15b302c",
            ],
        ),
        (
            HashOptions { extra_keys: Some(&keys), ..Default::default() },
            [
                "67e9f72522b34138a0f4be0e3a68d9d49b1e50aea0af7762f6170ad7eebbdeaf",
                "7493457b6e24d881371fedb4841b59ecba9aaf993d8493ed0177a944fdcfcb3b",
                "b75503e80dfb6d059b4eea2f98ae4273adb83ccce0acf1148c05a25bead1d2a1",
            ],
        ),
        (
            HashOptions { algorithm: XXH, seed: Some("0"), ..Default::default() },
            [
                "209f5d549fc07c8e39d823615ede61ce",
                "03888914ee75b87e89df867a21beb72b",
                "f1a782fa3401ed3cb6bd42b1ed0bd4dd",
            ],
        ),
        (
            HashOptions {
                algorithm: XXH,
                seed: Some("0"),
                extra_keys: Some(&keys),
                ..Default::default()
            },
            [
                "5010b1cc4b4366e0e96a6a8da63a2e14",
                "bb87aa06ffa34deb848d777223780d74",
                "3a268b52d7d29b20082c42fa5e465ff1",
            ],
        ),
    ];
    for (options, expected) in cases {
        let found = digests(&tokens, 16, options);
        assert_eq!(found, expected.map(unhex), "{options:?}");
    }
}

#[test]
fn seed_determines_the_first_parent() {
    let tokens: Vec<u64> = (0..16).collect();
    let sha_first = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0";
    let xxh_first = "1ebe36576dcb573f26b99533a20aaeca";
    let pickled_first = "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198";
    let cases = [
        (PICKLED, DEFAULT_SEED, pickled_first),
        (SHA, DEFAULT_SEED, sha_first),
        (XXH, "0", xxh_first),
    ];
    for (algorithm, seed, first) in cases {
        let first = unhex(first);
        let from_seed = HashOptions { algorithm, seed: Some(seed), ..Default::default() };
        let from_parent = HashOptions { algorithm, parent: Some(&first), ..Default::default() };
        let from_empty_parent = HashOptions { parent: Some(&[]), ..from_seed };
        let expected = digests(&tokens, 16, from_parent);
        assert_eq!(digests(&tokens, 16, from_seed), expected);
        assert_eq!(digests(&tokens, 16, from_empty_parent), expected);
    }
    // All algorithms have the same default seed. An empty seed is not the default.
    for algorithm in [PICKLED, SHA, XXH] {
        let default = HashOptions { algorithm, ..Default::default() };
        let explicit = HashOptions { seed: Some("vllm-none-hash"), ..default };
        let empty = HashOptions { seed: Some(""), ..default };
        assert_eq!(digests(&tokens, 16, default), digests(&tokens, 16, explicit));
        assert_ne!(digests(&tokens, 16, default), digests(&tokens, 16, empty));
    }
}

/// The tokens lie on both sides of each value at which the encoding grows.
#[test]
fn tokens_have_the_shortest_encoding() {
    let tokens = [0, 23, 24, 0xff, 0x100, 0xffff, 0x1_0000, 0xffff_ffff, 0x1_0000_0000, MAX_TOKEN];
    let encoded = unhex(
        "8a 00 17 1818 18ff 190100 19ffff 1a00010000 1affffffff 1b0000000100000000 1b8000000000000000",
    );
    let message = |previous: &[u8]| [&[0x83], previous, &encoded, &[0xf6]].concat();

    let sha_parent = [0xab; 32];
    let sha_message = message(&[&[0x58, 0x20], &sha_parent[..]].concat());
    let options = HashOptions { parent: Some(&sha_parent), ..Default::default() };
    assert_eq!(digests(&tokens, tokens.len(), options), [Sha256::digest(sha_message).to_vec()]);

    let xxh_parent = [0xab; 16];
    let xxh_message = message(&[&[0x50], &xxh_parent[..]].concat());
    let options = HashOptions { algorithm: XXH, parent: Some(&xxh_parent), ..Default::default() };
    assert_eq!(digests(&tokens, tokens.len(), options), [xxh3_128(&xxh_message).to_be_bytes()]);
}

#[test]
fn array_length_has_the_shortest_encoding() {
    for (block_size, head) in [(1, "81"), (23, "97"), (24, "9818"), (255, "98ff"), (256, "990100")]
    {
        let parent = [7; 32];
        let tokens = vec![1; block_size];
        let message =
            [&[0x83, 0x58, 0x20], &parent[..], &unhex(head), &vec![1; block_size], &[0xf6]]
                .concat();
        let options = HashOptions { parent: Some(&parent), ..Default::default() };
        assert_eq!(digests(&tokens, block_size, options), [Sha256::digest(message).to_vec()]);
    }
}

/// The tokens lie on both sides of each value at which pickle's integers grow. Messages of up to
/// seven blocks of SHA-256 show its padding, too.
#[test]
fn tokens_are_pickled_as_python_does() {
    let numbers = [
        (0, "4b00"),
        (0xff, "4bff"),
        (0x100, "4d0001"),
        (0xffff, "4dffff"),
        (0x1_0000, "4a00000100"),
        (0x7fff_ffff, "4affffff7f"),
        (0x8000_0000, "8a050000008000"),
        ((1 << 39) - 1, "8a05ffffffff7f"),
        (1 << 39, "8a06000000008000"),
        ((1 << 63) - 1, "8a08ffffffffffffff7f"),
        (MAX_TOKEN, "8a09000000000000008000"),
    ];
    let parent = [0xab; 32];
    for num_tokens in 1..100 {
        let (tokens, encoded): (Vec<u64>, String) =
            (0..num_tokens).map(|at| numbers[at * 7 % numbers.len()]).unzip();
        let (mark, tuple) = match num_tokens {
            1 => ("", "85"),
            2 => ("", "86"),
            3 => ("", "87"),
            _ => ("28", "74"),
        };
        let payload = [
            &unhex("4320")[..],
            &parent[..],
            &unhex(&format!("94 {mark} {encoded} {tuple} 94 4e 87 94 2e")),
        ]
        .concat();
        let length = (payload.len() as u64).to_le_bytes();
        let message = [&unhex("800595")[..], &length[..], &payload[..]].concat();
        let options =
            HashOptions { algorithm: PICKLED, parent: Some(&parent), ..Default::default() };
        assert_eq!(digests(&tokens, num_tokens, options), [Sha256::digest(message).to_vec()]);
    }
}

#[test]
fn a_seed_is_pickled_as_python_does() {
    for (num_bytes, head) in [(0, "8c00"), (255, "8cff"), (256, "5800010000")] {
        let seed = "s".repeat(num_bytes);
        let payload = [&unhex(head)[..], seed.as_bytes(), &unhex("942e")].concat();
        let length = (payload.len() as u64).to_le_bytes();
        let message = [&unhex("800595")[..], &length[..], &payload[..]].concat();
        let parent = Sha256::digest(message);
        let by_seed = HashOptions { algorithm: PICKLED, seed: Some(&seed), ..Default::default() };
        let by_parent =
            HashOptions { algorithm: PICKLED, parent: Some(&parent), ..Default::default() };
        assert_eq!(digests(&[1], 1, by_seed), digests(&[1], 1, by_parent));
    }
}

/// Pickle needs the caller's own objects for extra keys, and splits what exceeds 64 KiB.
#[test]
fn what_only_python_can_pickle_is_refused() {
    let options = HashOptions { algorithm: PICKLED, ..Default::default() };
    let keys = [None, Some(vec![])];
    let long_seed = "s".repeat(1 << 16);
    let cases = [
        (1, HashOptions { extra_keys: Some(&keys), ..options }),
        (6_000, options),
        (2, HashOptions { seed: Some(&long_seed), ..options }),
    ];
    for (block_size, options) in cases {
        assert!(!options.is_native(block_size));
        let message = refused(&[1, 2], block_size, options);
        assert!(message.contains("hash them with Python's pickle"), "{message}");
        assert!(HashOptions { algorithm: SHA, ..options }.is_native(block_size));
    }
    assert!(HashOptions { extra_keys: Some(&[None, None]), ..options }.is_native(1));
}

#[test]
fn every_kind_of_extra_key_is_encoded_as_vllm_does() {
    use ExtraKey::{Bool, Bytes, Int, Null, Sequence};
    let cases: [(BlockExtraKeys, &str); 9] = [
        (None, "f6"),
        (Some(vec![]), "80"),
        (Some(vec![Null, Bool(false), Bool(true)]), "83 f6 f4 f5"),
        (Some(vec![Int(23), Int(24), Int(-1), Int(-24), Int(-25)]), "85 17 1818 20 37 3818"),
        (
            Some(vec![Int(u64::MAX.into()), Int(-(1 << 64))]),
            "82 1bffffffffffffffff 3bffffffffffffffff",
        ),
        // Integers outside 64 bits are big numbers: tag 2 or 3, and the bytes.
        (
            Some(vec![Int(1 << 64), Int(-(1 << 64) - 1)]),
            "82 c249010000000000000000 c349010000000000000000",
        ),
        (Some(vec![Bytes(vec![]), Bytes(vec![0; 24])]), &format!("82 40 5818 {}", "00".repeat(24))),
        (Some(vec![text(""), text("é"), text("plain")]), "83 60 62c3a9 65706c61696e"),
        (Some(vec![Sequence(vec![]), Sequence(vec![Sequence(vec![Null])])]), "82 80 81 81 f6"),
    ];
    for (keys, encoded) in cases {
        let parent = [7; 32];
        let message = [&[0x83, 0x58, 0x20], &parent[..], &[0x81, 0x05], &unhex(encoded)].concat();
        let keys = [keys];
        let options =
            HashOptions { parent: Some(&parent), extra_keys: Some(&keys), ..Default::default() };
        assert_eq!(digests(&[5], 1, options), [Sha256::digest(message).to_vec()], "{keys:?}");
    }
}

#[test]
fn only_full_blocks_are_hashed() {
    let tokens: Vec<u64> = (0..47).collect();
    assert_eq!(digests(&tokens, 16, HashOptions::default()).len(), 2);
    assert_eq!(
        digests(&tokens, 16, HashOptions::default()),
        digests(&tokens[..32], 16, HashOptions::default())
    );
    assert!(digests(&[], 16, HashOptions::default()).is_empty());
    assert!(digests(&tokens, usize::MAX, HashOptions::default()).is_empty());
}

fn refused(tokens: &[u64], block_size: usize, options: HashOptions<'_>) -> String {
    match hash_tokens(tokens, block_size, options) {
        Err(Error::Config(message)) => message,
        other => format!("not refused: {other:?}"),
    }
}

#[test]
fn error_names_the_bad_value_and_its_place() {
    let zero = refused(&[1, 2], 0, HashOptions::default());
    assert_eq!(zero, "block_size is 0: a block has at least 1 token");

    // A bad token in the partial last block is an error, too.
    let tokens = [1, 2, MAX_TOKEN + 1];
    let large = refused(&tokens, 2, HashOptions::default());
    assert_eq!(large, "token 2 is 9223372036854775809: token ids go from 0 to 2**63");

    for (algorithm, num_bytes, width) in [(SHA, 16, 32), (SHA, 33, 32), (XXH, 32, 16)] {
        let parent = vec![0; num_bytes];
        let options = HashOptions { algorithm, parent: Some(&parent), ..Default::default() };
        let message = refused(&[1, 2], 2, options);
        let start = format!("parent has {num_bytes} bytes and {algorithm} digests have {width}:");
        assert!(message.starts_with(&start), "{message}");
    }

    for num_entries in [0, 1, 3] {
        let keys = vec![None; num_entries];
        let options = HashOptions { extra_keys: Some(&keys), ..Default::default() };
        let message = refused(&[1, 2, 3, 4, 5], 2, options);
        let start =
            format!("extra_keys has {num_entries} entries and the tokens fill 2 blocks of 2:");
        assert!(message.starts_with(&start), "{message}");
    }
}

#[test]
fn extra_keys_that_nest_too_deep_are_refused() {
    let nested = |depth| {
        let wrap = |key, _| ExtraKey::Sequence(vec![key]);
        [None, Some(vec![(0..depth).fold(ExtraKey::Null, wrap)])]
    };
    let deepest = nested(MAX_EXTRA_KEY_DEPTH);
    let options = HashOptions { extra_keys: Some(&deepest), ..Default::default() };
    assert_eq!(digests(&[1, 2], 1, options).len(), 2);

    let too_deep = nested(MAX_EXTRA_KEY_DEPTH + 1);
    let options = HashOptions { extra_keys: Some(&too_deep), ..Default::default() };
    let message = refused(&[1, 2], 1, options);
    assert!(message.starts_with("the extra keys of block 1 nest deeper than 32"), "{message}");
}

#[test]
fn algorithms_have_the_names_of_vllm() {
    for algorithm in [PICKLED, SHA, XXH] {
        assert_eq!(algorithm.name().parse(), Ok(algorithm));
        assert_eq!(
            digests(&[1], 1, HashOptions { algorithm, ..Default::default() })[0].len(),
            algorithm.digest_bytes()
        );
    }
    let message = "md5".parse::<Algorithm>().unwrap_err().to_string();
    for word in ["\"md5\"", "\"sha256\"", "\"sha256_cbor\"", "\"xxhash_cbor\""] {
        assert!(message.contains(word), "{message}");
    }
}

proptest! {
    /// A digest as the parent continues the chain. A changed token changes the digest of its block
    /// and of all later blocks.
    #[test]
    fn digests_are_chained(
        mut tokens in prop::collection::vec(0..=MAX_TOKEN, 1..200),
        block_size in 1_usize..20,
        at in any::<prop::sample::Index>(),
        algorithm in prop::sample::select(vec![PICKLED, SHA, XXH]),
    ) {
        let options = HashOptions { algorithm, ..Default::default() };
        let whole = digests(&tokens, block_size, options);
        prop_assert_eq!(whole.len(), tokens.len() / block_size);

        let changed = at.index(tokens.len());
        let block = changed / block_size;
        if block > 0 && block <= whole.len() {
            let rest = HashOptions { parent: Some(&whole[block - 1]), ..options };
            prop_assert_eq!(&digests(&tokens[block * block_size..], block_size, rest), &whole[block..]);
        }

        tokens[changed] = (tokens[changed] + 1) % (MAX_TOKEN + 1);
        let other = digests(&tokens, block_size, options);
        let unchanged: Vec<bool> = whole.iter().zip(&other).map(|(a, b)| a == b).collect();
        let expected: Vec<bool> = (0..whole.len()).map(|position| position < block).collect();
        prop_assert_eq!(unchanged, expected);
    }
}
