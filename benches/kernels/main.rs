//! Kernel benchmarks: one table of operations, which every device runs. Each row is compared with a copy of
//! the same number of bytes on the same device in the same run.
//!
//! - `tensorwise`, `blocks`: the table. A row declares its operands and calls an operation on views of them.
//! - `row`: the row type. `machine`: the interface of a device. `cpu`, `cuda`: the devices.
//!
//! A group is an operation, and a benchmark is `operation/device/what`. `cargo bench -- quantize/cpu` runs a
//! part, and `cargo bench -- cuda` one device. Throughput counts bytes read and written, each operand once.
//! After each row, its throughput is printed as a fraction of the copy's.
//!
//! Without a CUDA device, its rows are skipped with a message.

mod blocks;
mod cpu;
mod cuda;
mod machine;
mod row;
mod tensorwise;

use std::collections::HashMap;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use machine::Machine;
use row::{Ready, Row};

const SAMPLES: usize = 10;

fn benches(c: &mut Criterion) {
    run(c, &cpu::Cpu);
    match cuda::Cuda::open() {
        Ok(machine) => run(c, &machine),
        Err(reason) => eprintln!("The CUDA rows are skipped: {reason}."),
    }
}

/// Runs the table on one machine.
fn run(c: &mut Criterion, machine: &dyn Machine) {
    let plan = machine.plan();
    let mut rows = tensorwise::rows(&plan);
    rows.extend(blocks::rows(&plan));
    for rows in rows.chunk_by(|a, b| a.op == b.op) {
        let mut group = c.benchmark_group(rows[0].op);
        group.sample_size(SAMPLES).warm_up_time(plan.warm_up).measurement_time(plan.measurement);
        let mut copies = HashMap::new();
        for row in rows {
            let copy = *copies
                .entry(row::size(row.bytes()))
                .or_insert_with(|| bench(&mut group, machine, &Row::copy(row.bytes())));
            if let (Some(took), Some(copy)) = (bench(&mut group, machine, row), copy) {
                println!("{:24}{:.2} of the copy's throughput", "", took / copy);
            }
        }
        group.finish();
    }
}

/// Runs one benchmark. Returns its median throughput in bytes per second, or None if it is filtered out.
fn bench(group: &mut BenchmarkGroup<WallTime>, machine: &dyn Machine, row: &Row) -> Option<f64> {
    let bytes = row.bytes();
    let mut ready: Option<Ready> = None;
    let mut speeds = Vec::new();
    group.throughput(Throughput::BytesDecimal(bytes as u64));
    group.bench_function(BenchmarkId::new(machine.name(), &row.name), |b| {
        // Memory is allocated only for rows that run, and only while they run.
        let ready = ready.get_or_insert_with(|| row.prepare(machine));
        b.iter_custom(|rounds| {
            let took = machine.time(rounds, &mut || ready.run());
            speeds.push(bytes as f64 * rounds as f64 / took.as_secs_f64());
            took
        });
    });
    // The samples come after the warm-up. There are none if benchmarks are only tested or listed.
    let mut samples = speeds.split_off(speeds.len().checked_sub(SAMPLES)?);
    samples.sort_by(f64::total_cmp);
    Some(samples[SAMPLES / 2])
}

criterion_group!(kernels, benches);
criterion_main!(kernels);
