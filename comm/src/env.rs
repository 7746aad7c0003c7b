//! Ranks and rendezvous from the environment.
