//! A row of the table declares the operands of an operation once, and calls the operation on views of them.
//! A row runs on any machine.

use fp8rs::{DType, Error, Stream, View, ViewMut};

use crate::machine::{Buffer, Case, Fill, Machine, copies};

/// The call of a row in each round.
type Call = Box<dyn Fn(&Round) -> Result<(), Error>>;

/// One benchmark.
pub(crate) struct Row {
    /// The operation, which is the name of the group.
    pub(crate) op: &'static str,
    /// The name of the row within the group.
    pub(crate) name: String,
    operands: Vec<Operand>,
    call: Call,
}

impl Row {
    /// Creates a row that copies, reading and writing `bytes` in total, to compare other rows with. Sizes are
    /// multiples of 16 bytes, like the sizes of the large operands.
    pub(crate) fn copy(bytes: usize) -> Self {
        let mut o = Operands::default();
        let half = (1, (bytes / 32).max(1) * 16);
        let (from, to) = (o.input(DType::E4m3, half), o.output(DType::E4m3, half));
        o.row("copy", format!("copy/{}", size(bytes)), move |r| {
            r.copy(to, from);
            Ok(())
        })
    }

    /// Returns the bytes of all operands, each of which must be read or written once.
    pub(crate) fn bytes(&self) -> usize {
        self.operands.iter().map(Operand::bytes).sum()
    }

    /// Allocates the row's memory on a machine and runs it once, so that kernels are loaded and all pages are
    /// touched.
    pub(crate) fn prepare<'m>(&'m self, machine: &'m dyn Machine) -> Ready<'m> {
        let copies = copies(self.bytes());
        let operand = |operand: &'m Operand| {
            let pattern = operand.fill.pattern(operand.dtype, operand.count());
            let buffers = (0..copies).map(|_| Buffer::new(machine, operand.bytes(), &pattern)).collect();
            (operand, buffers)
        };
        let operands = self.operands.iter().map(operand).collect();
        let mut ready = Ready { call: &self.call, round: Round { machine, operands, turn: 0 } };
        machine.time(copies as u64, &mut || ready.run());
        ready
    }
}

/// Formats a number of bytes with three significant digits, so that sizes that differ only by a few scales
/// share a copy.
pub(crate) fn size(bytes: usize) -> String {
    let (value, unit) = match bytes as f64 {
        bytes if bytes < 1e6 => (bytes / 1e3, "kB"),
        bytes if bytes < 1e9 => (bytes / 1e6, "MB"),
        bytes => (bytes / 1e9, "GB"),
    };
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$}{unit}")
}

struct Operand {
    dtype: DType,
    shape: (usize, usize),
    strides: (isize, isize),
    fill: Fill,
}

impl Operand {
    fn count(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    fn bytes(&self) -> usize {
        self.count() * self.dtype.size()
    }
}

/// Identifies an operand in its row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Id(usize);

/// The operands of a row under construction.
#[derive(Default)]
pub(crate) struct Operands(Vec<Operand>);

impl Operands {
    fn add(&mut self, dtype: DType, shape: (usize, usize), fill: Fill) -> Id {
        self.0.push(Operand { dtype, shape, strides: (shape.1 as isize, 1), fill });
        Id(self.0.len() - 1)
    }

    /// Adds a contiguous matrix of random data.
    pub(crate) fn input(&mut self, dtype: DType, shape: (usize, usize)) -> Id {
        self.add(dtype, shape, Fill::Random)
    }

    /// Adds the input of a case.
    pub(crate) fn case(&mut self, case: Case) -> Id {
        self.input(case.dtype, case.shape)
    }

    /// Adds a contiguous fp32 matrix whose elements are all `value`.
    pub(crate) fn value(&mut self, value: f32, shape: (usize, usize)) -> Id {
        self.add(DType::F32, shape, Fill::Value(value))
    }

    /// Adds a contiguous matrix to write to.
    pub(crate) fn output(&mut self, dtype: DType, shape: (usize, usize)) -> Id {
        self.add(dtype, shape, Fill::Zeros)
    }

    /// Adds a matrix to write to whose columns are contiguous.
    pub(crate) fn output_by_columns(&mut self, dtype: DType, shape: (usize, usize)) -> Id {
        let id = self.output(dtype, shape);
        self.0[id.0].strides = (1, shape.0 as isize);
        id
    }

    /// Creates the row with these operands.
    pub(crate) fn row(
        self,
        op: &'static str,
        name: impl Into<String>,
        call: impl Fn(&Round) -> Result<(), Error> + 'static,
    ) -> Row {
        Row { op, name: name.into(), operands: self.0, call: Box::new(call) }
    }
}

/// A row with its memory.
pub(crate) struct Ready<'m> {
    call: &'m Call,
    round: Round<'m>,
}

impl Ready<'_> {
    /// Calls the operation with the next copy of the operands.
    pub(crate) fn run(&mut self) {
        self.round.turn = self.round.turn.wrapping_add(1);
        (self.call)(&self.round).expect("the row's operands fit the operation");
    }
}

/// The operands of one call.
pub(crate) struct Round<'m> {
    machine: &'m dyn Machine,
    operands: Vec<(&'m Operand, Vec<Buffer<'m>>)>,
    turn: usize,
}

impl Round<'_> {
    pub(crate) fn stream(&self) -> Stream {
        self.machine.stream()
    }

    fn operand(&self, id: Id) -> (&Operand, *mut u8) {
        let (operand, buffers) = &self.operands[id.0];
        (operand, buffers[self.turn % buffers.len()].at())
    }

    /// Returns a view of an operand to read.
    pub(crate) fn view(&self, id: Id) -> View<'_> {
        let (Operand { dtype, shape, strides, .. }, at) = self.operand(id);
        // SAFETY: the buffer holds the elements on this device, and is freed after the work that was queued
        // with it.
        unsafe { View::from_raw(at, *dtype, self.machine.device(), *shape, *strides) }
    }

    /// Returns a view of an operand to write to. It must be used for one argument of one call; calls return
    /// an error if outputs overlap.
    pub(crate) fn out(&self, id: Id) -> ViewMut<'_> {
        let (Operand { dtype, shape, strides, .. }, at) = self.operand(id);
        // SAFETY: the buffer holds the elements on this device, and is freed after the work that was queued
        // with it. Only one call uses this round's memory.
        unsafe { ViewMut::from_raw(at, *dtype, self.machine.device(), *shape, *strides) }
    }

    /// Returns views of a contiguous operand to read, split into `count` matrices with the same number of
    /// rows.
    pub(crate) fn views(&self, id: Id, count: usize) -> Vec<View<'_>> {
        let (Operand { dtype, shape, strides, .. }, at) = self.operand(id);
        let part = (shape.0 / count, shape.1);
        let bytes = part.0 * part.1 * dtype.size();
        let device = self.machine.device();
        let view = |i| {
            // SAFETY: part `i` is inside the buffer, which is on this device and is freed after the work that
            // was queued with it.
            unsafe { View::from_raw(at.wrapping_add(i * bytes), *dtype, device, part, *strides) }
        };
        (0..count).map(view).collect()
    }

    /// Returns views of a contiguous operand to write to, split into `count` matrices with the same number of
    /// rows.
    pub(crate) fn outs(&self, id: Id, count: usize) -> Vec<ViewMut<'_>> {
        let (Operand { dtype, shape, strides, .. }, at) = self.operand(id);
        let part = (shape.0 / count, shape.1);
        let bytes = part.0 * part.1 * dtype.size();
        let device = self.machine.device();
        let out = |i| {
            // SAFETY: part `i` is inside the buffer, which is on this device and is freed after the work that
            // was queued with it. The parts do not overlap.
            unsafe { ViewMut::from_raw(at.wrapping_add(i * bytes), *dtype, device, part, *strides) }
        };
        (0..count).map(out).collect()
    }

    fn copy(&self, to: Id, from: Id) {
        let ((operand, to), (_, from)) = (self.operand(to), self.operand(from));
        // SAFETY: the operands have the same size, and each has its own buffer.
        unsafe { self.machine.copy(to, from, operand.bytes()) }
    }
}
