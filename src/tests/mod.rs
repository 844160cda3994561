//! Tests of the operations as a whole, with names that only the crate sees. Tests that need a process of their
//! own are in `tests/`.

mod adamw;
mod blocks;
mod common;
mod cpu_bytes;
mod empty;
mod flush_to_zero;
mod fused;
mod golden;
mod validation;
