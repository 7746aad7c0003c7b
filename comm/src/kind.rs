//! The operations of a group: their names, and their codes in descriptors and records.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    AllReduce = 1,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Barrier,
    NewGroup,
    Send,
    Recv,
    AllGatherV,
    ReduceScatterV,
    AllToAllV,
    BatchSendRecv,
    ReadPeers,
}

impl Kind {
    const ALL: [Kind; 17] = [
        Kind::AllReduce,
        Kind::Reduce,
        Kind::Broadcast,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Gather,
        Kind::Scatter,
        Kind::Barrier,
        Kind::NewGroup,
        Kind::Send,
        Kind::Recv,
        Kind::AllGatherV,
        Kind::ReduceScatterV,
        Kind::AllToAllV,
        Kind::BatchSendRecv,
        Kind::ReadPeers,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::Reduce => "reduce",
            Kind::Broadcast => "broadcast",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::Barrier => "barrier",
            Kind::NewGroup => "new_group",
            Kind::Send => "send",
            Kind::Recv => "recv",
            Kind::AllGatherV => "all_gather_v",
            Kind::ReduceScatterV => "reduce_scatter_v",
            Kind::AllToAllV => "all_to_all_v",
            Kind::BatchSendRecv => "batch_send_recv",
            Kind::ReadPeers => "read_peers",
        }
    }

    /// The kind with this code, if there is one.
    pub fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// The kind with this name, if there is one.
    pub fn from_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether it is between two ranks, and no collective.
    pub fn is_message(self) -> bool {
        matches!(self, Kind::Send | Kind::Recv | Kind::BatchSendRecv)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter)
    }

    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::ReduceScatterV)
    }
}
