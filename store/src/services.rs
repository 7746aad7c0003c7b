//! The services behind one address, by their ids.

use std::collections::HashMap;

use super::service::{Service, ServiceId};
use super::store_service::StoreService;
use super::tcp_store::TcpStoreService;

/// The services behind an address.
#[derive(Default)]
pub struct Services {
    pub stores: HashMap<ServiceId, StoreService>,
    pub tcp_stores: HashMap<ServiceId, TcpStoreService>,
}

impl Services {
    /// Returns the service with this id.
    pub fn get_mut(&mut self, id: ServiceId) -> Option<&mut dyn Service> {
        if let Some(store) = self.stores.get_mut(&id) {
            return Some(store);
        }
        Some(self.tcp_stores.get_mut(&id)?)
    }

    /// Forgets the service with this id.
    pub fn remove(&mut self, id: ServiceId) {
        self.stores.remove(&id);
        self.tcp_stores.remove(&id);
    }
}
