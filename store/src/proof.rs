//! Proofs of knowing a token, by which processes of a job recognize each other: HMAC-SHA256 of a
//! message that is used once, with the token as key. The token itself is not sent.

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// The size in bytes of a proof.
pub const SIZE: usize = 32;

/// Returns the proof that this process knows `token`, for `message`.
pub fn prove(token: &str, message: &[u8]) -> [u8; SIZE] {
    hmac(token, message).finalize().into_bytes().into()
}

/// Whether `proof` is that of `token` for `message`. The time this takes says nothing about the
/// right proof.
pub fn is_right(proof: &[u8], token: &str, message: &[u8]) -> bool {
    hmac(token, message).verify_slice(proof).is_ok()
}

fn hmac(token: &str, message: &[u8]) -> Hmac<Sha256> {
    Hmac::<Sha256>::new_from_slice(token.as_bytes())
        .expect("a key may have any length")
        .chain_update(message)
}
