//! Kernel benchmarks: one group for each operation, one row for each device and dtype, and in each group a copy
//! of the same bytes (read and written) in the same run.
//!
//! `cargo bench -- quantize/cpu` runs a part. Each backend has a file; its rows join the groups by their names.

mod cpu;

use criterion::{criterion_group, criterion_main};

criterion_group! {
    name = benches;
    config = criterion::Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2));
    targets = cpu::benches
}
criterion_main!(benches);
