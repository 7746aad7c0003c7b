//! A graph that is the same in every backward: [`DdpBuilder::static_graph`](crate::DdpBuilder::static_graph).

/// What the first backward that reduces gradients has shown of the graph.
struct Learnt {
    /// How often each parameter's gradient comes on this rank in a backward.
    times: Vec<u32>,
    /// The parameters that some rank uses.
    used: Vec<bool>,
}

/// Tells when a parameter's gradient is final, however often it comes in a backward.
pub(crate) struct StaticGraph {
    learnt: Option<Learnt>,
    /// How often each parameter's gradient has come in this backward.
    times: Vec<u32>,
}

impl StaticGraph {
    /// Returns the graph of so many parameters, of which nothing is known.
    pub fn new(parameters: usize) -> Self {
        Self { learnt: None, times: vec![0; parameters] }
    }

    /// Returns whether the graph is known.
    pub fn is_learnt(&self) -> bool {
        self.learnt.is_some()
    }

    /// Begins a backward that reduces gradients.
    pub fn begin(&mut self) {
        self.times.fill(0);
    }

    /// Counts a gradient. Returns whether it is final; while the graph is not known, none is. The
    /// error says how the graph has changed.
    pub fn count(&mut self, index: usize) -> Result<bool, String> {
        self.times[index] += 1;
        let Some(Learnt { times, .. }) = &self.learnt else { return Ok(false) };
        let expected = times[index];
        if self.times[index] > expected {
            return Err(format!(
                "has got more gradients in a backward than in the first one, which had {expected}"
            ));
        }
        Ok(self.times[index] == expected)
    }

    /// Returns whether no rank has used a parameter in the first backward.
    pub fn is_left_out(&self, index: usize) -> bool {
        self.learnt.as_ref().is_some_and(|learnt| !learnt.used[index])
    }

    /// Learns the graph from the first backward, which is over, and in which some rank has used
    /// these parameters. Returns the parameters that some rank uses.
    pub fn learn(&mut self, used: Vec<bool>) -> &[bool] {
        let times = &self.times;
        &self.learnt.get_or_insert_with(|| Learnt { times: times.clone(), used }).used
    }

    /// Returns the parameters that only other ranks use.
    pub fn unused_here(&self) -> Vec<usize> {
        let Some(Learnt { times, used }) = &self.learnt else { return Vec::new() };
        (0..times.len()).filter(|&index| used[index] && times[index] == 0).collect()
    }

    /// Returns the parameters of which gradients are lacking that the first backward had.
    pub fn lacking(&self) -> Vec<usize> {
        let Some(Learnt { times, .. }) = &self.learnt else { return Vec::new() };
        (0..times.len()).filter(|&index| self.times[index] < times[index]).collect()
    }
}
