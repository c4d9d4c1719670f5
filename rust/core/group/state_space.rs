//! Recurrent state (Mamba): a block holds the state after its last token. The state replaces all
//! tokens before it.

/// Number of tokens that no later token reads: all but the last.
pub(super) fn num_skipped_tokens(num_tokens: usize) -> usize {
    num_tokens.saturating_sub(1)
}
