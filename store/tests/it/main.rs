//! Stores over real sockets: Flow's own, and PyTorch's TCPStore.

mod store;
mod store_complaints;
mod tcp_store;
mod tcp_store_pytorch;
