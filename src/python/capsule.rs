//! Tensors that come in a capsule, from `__dlpack__`.

use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack::{
    DLManagedTensorVersioned, DLTensor, MAJOR_VERSION, USED_VERSIONED_CAPSULE, VERSIONED_CAPSULE,
};

/// A tensor that an exporter handed over; given back when dropped.
pub(super) struct Managed(NonNull<DLManagedTensorVersioned>);

impl Managed {
    /// The tensor in a capsule, which is ours from then on. None if it is of a version that we do not know, or
    /// somebody else's already.
    pub(super) fn take(capsule: &Bound<'_, PyCapsule>) -> Option<Self> {
        let object = capsule.as_ptr();
        // SAFETY: a live capsule; the name is compared before the pointer is handed out.
        let tensor = unsafe {
            if ffi::PyCapsule_IsValid(object, VERSIONED_CAPSULE.as_ptr()) == 0 {
                return None;
            }
            ffi::PyCapsule_GetPointer(object, VERSIONED_CAPSULE.as_ptr())
        };
        // SAFETY: renaming it is how a capsule's tensor changes owner; the name is static.
        unsafe { ffi::PyCapsule_SetName(object, USED_VERSIONED_CAPSULE.as_ptr()) };
        let managed = Self(NonNull::new(tensor.cast())?);
        // SAFETY: the version is laid out the same in all versions.
        let major = unsafe { managed.0.as_ref() }.version.major;
        (major == MAJOR_VERSION).then_some(managed)
    }

    /// The tensor, whose memory lives until this is dropped, and its flags.
    pub(super) fn tensor(&self) -> (DLTensor, u64) {
        // SAFETY: owned by us, of a version that we know.
        let managed = unsafe { self.0.as_ref() };
        (managed.dl_tensor, managed.flags)
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: owned by us, and given back once. The deleter's place is the same in all versions.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}
