//! Recurrent state (Mamba): a block holds the state after its last token, which stands for all
//! tokens before it.

/// Tokens that no later token reads: all but the last.
pub(super) fn num_skipped_tokens(num_tokens: usize) -> usize {
    num_tokens.saturating_sub(1)
}
