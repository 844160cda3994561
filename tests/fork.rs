//! A forked child, such as a `DataLoader` worker, has none of its parent's threads.

#![cfg(unix)]

use fp8rs::{Stream, View, ViewMut, ops};

fn amax_of_a_large_tensor() -> f32 {
    let mut x = vec![1.0_f32; 1 << 20];
    x[777_777] = -3.0;
    let mut out = [0.0];
    ops::amax(
        View::from_slice(&x, 1024, 1024).unwrap(),
        ViewMut::from_slice(&mut out, 1, 1).unwrap(),
        Stream::default(),
    )
    .unwrap();
    out[0]
}

/// Returns the number of threads of this process that the pool started.
#[cfg(target_os = "linux")]
fn pool_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("fp8rs-")).count()
}

#[test]
fn forked_child_starts_its_own_threads() {
    // Force a pool, also on a machine with one core, because the pool is what a fork breaks.
    // SAFETY: this is the only test of the process, so no other thread reads the environment.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", "2") };
    // Create the parent's pool, whose threads do not exist in the child.
    assert_eq!(amax_of_a_large_tensor(), 3.0);
    #[cfg(target_os = "linux")]
    assert!(pool_threads() > 0, "work on a large tensor starts threads");
    // SAFETY: the child only computes and exits with `_exit`. If it waits for threads that do not exist, the
    // alarm ends it.
    let status = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(20);
            libc::_exit(i32::from(amax_of_a_large_tensor() != 3.0));
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    };
    assert_eq!(status, 0, "the child failed or hung");
    assert_eq!(amax_of_a_large_tensor(), 3.0);
}
