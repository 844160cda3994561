use crate::error::Error;
use crate::spec::{AdamWCall, Stream};
pub(crate) fn adamw(_call: AdamWCall, _stream: Stream) -> Result<(), Error> { todo!() }
