//! Orders of samples of one's own.

use std::sync::Arc;

use flow_ddp::{BatchSampler, DataLoader, DistributedSampler, Order, Sampler, Shuffle};

use crate::draws::{Numbers, alone};

/// An order of this file's own.
struct Evens(usize);

impl Sampler for Evens {
    type Item = usize;

    fn samples(&self) -> usize {
        self.0
    }

    fn places(&self) -> usize {
        self.0.div_ceil(2)
    }

    fn order(&self, _epoch: u64) -> Order<usize> {
        Order::computed(|place| 2 * place)
    }

    fn shuffle(&self) -> Shuffle {
        Shuffle::Other("evens".into())
    }
}

#[test]
fn an_order_of_ones_own_is_dealt_and_named() {
    let sampler = DistributedSampler::wrap_replica(Evens(9), 2, 1).unwrap();
    assert_eq!(sampler.indices(), [2, 6, 0]);
    let state = serde_json::to_value(sampler.state()).unwrap();
    assert_eq!(state["shuffle"]["other"], "evens");
    let mut other = DistributedSampler::wrap_replica(Evens(9), 3, 1).unwrap();
    other.resume(&serde_json::from_value(state).unwrap()).unwrap();
    assert_eq!(other.state(), sampler.state());
}

/// A list whose length and name are free, for a data set of three.
#[derive(Clone)]
struct List(Vec<usize>, &'static str);

impl Sampler for List {
    type Item = usize;

    fn samples(&self) -> usize {
        3
    }

    fn order(&self, _epoch: u64) -> Order<usize> {
        Order::list(self.0.clone())
    }

    fn shuffle(&self) -> Shuffle {
        Shuffle::Other(self.1.into())
    }
}

#[test]
fn a_name_that_flow_has_too_is_resumed_from_a_checkpoint() {
    for name in ["none", "torch", "keyed", "stream", ""] {
        let mut sampler = alone(List(vec![2, 0, 1], name));
        let state = serde_json::to_string(&sampler.state()).unwrap();
        sampler.resume(&serde_json::from_str(&state).unwrap()).unwrap();
    }
}

#[test]
fn a_list_of_another_length_than_its_places_is_an_error() {
    let dataset = Arc::new(Numbers(3));
    for list in [vec![2, 0], vec![2, 0, 1, 1], vec![]] {
        let expected = format!(
            "the sampler's order lists {} items, it should have as many as its places(): 3",
            list.len()
        );
        let sampler = List(list, "short or long");
        let by_samples = alone(sampler.clone());
        let batches = alone(BatchSampler::new(sampler, 2).unwrap());
        for batches in [
            DataLoader::new(&dataset, &by_samples, 2).into_iter(),
            DataLoader::with_batch_sampler(&dataset, &batches).into_iter(),
        ] {
            let [Err(error)] = &Vec::from_iter(batches)[..] else { panic!("no error") };
            assert_eq!(error.to_string(), expected);
        }
    }
}

#[test]
#[should_panic(expected = "the sampler's order lists 2 items")]
fn indices_of_such_a_list_are_a_panic() {
    alone(List(vec![2, 0], "short")).indices();
}

/// A batch sampler whose second batch panics.
struct Cursed;

impl Sampler for Cursed {
    type Item = Vec<usize>;

    fn samples(&self) -> usize {
        3
    }

    fn order(&self, _epoch: u64) -> Order<Vec<usize>> {
        Order::computed(|place| vec![[2][place]])
    }

    fn shuffle(&self) -> Shuffle {
        Shuffle::Other("cursed".into())
    }
}

#[test]
fn an_order_that_panics_is_an_error_of_the_batch() {
    for workers in [0, 2] {
        let sampler = alone(Cursed);
        let batches = DataLoader::with_batch_sampler(&Arc::new(Numbers(3)), &sampler)
            .workers(workers)
            .into_iter();
        let [Ok(batch), Err(error)] = &Vec::from_iter(batches)[..] else { panic!("no error") };
        assert_eq!(batch, &[2]);
        assert_eq!(
            error.to_string(),
            "the data set panicked in batch 1 of rank 0 (positions 1 to 2 of its epoch): index out \
             of bounds: the len is 1 but the index is 1"
        );
    }
}
