//! The operations of a group: their names, and their codes in descriptors and records.

/// Declares [`Kind`]: each with its code and its name.
macro_rules! kinds {
    ($($kind:ident = $code:literal, $name:literal;)*) => {
        /// An operation of a group.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Kind {
            $($kind = $code,)*
        }

        impl Kind {
            /// Returns its name in messages and records.
            pub fn name(self) -> &'static str {
                match self {
                    $(Kind::$kind => $name,)*
                }
            }

            /// Returns the kind with this name, if there is one.
            pub fn from_name(name: &str) -> Option<Kind> {
                match name {
                    $($name => Some(Kind::$kind),)*
                    _ => None,
                }
            }

            /// Returns the kind with this code, if there is one.
            pub fn from_code(code: u8) -> Option<Kind> {
                match code {
                    $($code => Some(Kind::$kind),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    AllReduce = 1, "all_reduce";
    Reduce = 2, "reduce";
    Broadcast = 3, "broadcast";
    AllGather = 4, "all_gather";
    ReduceScatter = 5, "reduce_scatter";
    AllToAll = 6, "all_to_all";
    Gather = 7, "gather";
    Scatter = 8, "scatter";
    Barrier = 9, "barrier";
    NewGroup = 10, "new_group";
    Send = 11, "send";
    Recv = 12, "recv";
    AllGatherV = 13, "all_gather_v";
    ReduceScatterV = 14, "reduce_scatter_v";
    AllToAllV = 15, "all_to_all_v";
    BatchSendRecv = 16, "batch_send_recv";
    ReadPeers = 17, "read_peers";
    BarrierOnMachine = 18, "barrier_on_machine";
}

impl Kind {
    /// Whether it is between two ranks, and no collective.
    pub fn is_message(self) -> bool {
        matches!(self, Kind::Send | Kind::Recv | Kind::BatchSendRecv)
    }

    /// Whether one rank, the root, has a part of its own in it.
    pub fn has_root(self) -> bool {
        matches!(self, Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter)
    }

    /// Whether each rank contributes a number of elements of its own, which is not that of others.
    pub fn has_own_counts(self) -> bool {
        self == Kind::AllToAllV
    }

    /// Whether it reduces the ranks' elements.
    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::ReduceScatterV)
    }
}
