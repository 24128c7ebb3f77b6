//! What the project's tools share.

pub mod fetch;
