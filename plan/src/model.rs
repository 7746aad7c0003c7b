//! The model as a list of layers, with the bytes and operations of one sample.

use std::ops::Range;

use serde::Deserialize;

use crate::error::{Error, Result, not_negative};
use crate::split::split;

/// A layer, or several equal ones. Bytes and operations are those of one sample, before tensor
/// parallelism splits them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// The number of equal layers; 1 if left out.
    pub repeat: Option<usize>,
    /// Parameters.
    #[serde(default)]
    pub parameters: f64,
    /// Parameters of the first layer that this layer uses too. They are a copy, unless both layers are
    /// on one rank.
    #[serde(default)]
    pub tied_parameters: f64,
    /// Floating point operations of the forward; the backward has twice as many.
    pub flops: f64,
    /// The smallest dimension of its matrix products, beside the batch. Tensor parallelism divides it.
    /// If left out, the products are so large that their size does not matter.
    pub gemm_size: Option<f64>,
    /// Rows of its matrix products for one sample, as the tokens of a sequence; 1 if left out.
    pub rows: Option<f64>,
    /// Bytes of the input.
    #[serde(default)]
    pub input: f64,
    /// Bytes that are kept for the backward and that tensor parallelism divides.
    #[serde(default)]
    pub activations: f64,
    /// Bytes that each rank of tensor parallelism keeps for the backward, unless sequence parallelism
    /// divides them.
    #[serde(default)]
    pub replicated_activations: f64,
    /// Bytes of inputs of linear layers, which sequence parallelism gathers. Each rank of tensor
    /// parallelism keeps them for the backward. With sequence parallelism it keeps its part only,
    /// unless [`Training::keep_gathered`](crate::Training::keep_gathered) is set.
    #[serde(default)]
    pub gathered_activations: f64,
    /// Bytes kept for the backward that selective recomputation does not keep: the scores of
    /// attention. Tensor parallelism divides them.
    #[serde(default)]
    pub score_activations: f64,
    /// Operations by which selective recomputation computes the scores again.
    #[serde(default)]
    pub score_flops: f64,
    /// Bytes that tensor parallelism all-reduces in the forward, and again in the backward.
    #[serde(default)]
    pub all_reduce: f64,
    /// Whether full recomputation keeps the layer's activations.
    #[serde(default)]
    pub never_recomputed: bool,
}

impl Layer {
    /// Returns an error unless the layer's numbers are possible. `index` is its place in the model.
    fn check(&self, index: usize) -> Result<()> {
        let numbers = [
            ("parameters", self.parameters),
            ("tied_parameters", self.tied_parameters),
            ("flops", self.flops),
            ("input", self.input),
            ("activations", self.activations),
            ("replicated_activations", self.replicated_activations),
            ("gathered_activations", self.gathered_activations),
            ("score_activations", self.score_activations),
            ("score_flops", self.score_flops),
            ("all_reduce", self.all_reduce),
        ];
        for (name, value) in numbers {
            not_negative(format!("layers[{index}].{name}"), value)?;
        }
        let counts = [
            ("repeat", self.repeat.map(|count| count as f64)),
            ("gemm_size", self.gemm_size),
            ("rows", self.rows),
        ];
        for (name, value) in counts {
            let value = value.unwrap_or(1.0);
            if !(1.0..=1e30).contains(&value) {
                let field = format!("layers[{index}].{name}");
                return Err(Error::field(field, value, "give a number of at least 1"));
            }
        }
        Ok(())
    }
}

/// The shape of a transformer of the kind of GPT.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transformer {
    /// Blocks of attention and MLP.
    pub layers: usize,
    /// Features of a token.
    pub hidden: usize,
    /// Heads of attention: tensor parallelism divides them.
    pub heads: usize,
    /// Tokens of a sample.
    pub sequence: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Features inside the MLP; 4 x `hidden` if left out.
    pub mlp: Option<usize>,
    /// Whether there is dropout, whose masks are kept for the backward; yes if left out.
    pub dropout: Option<bool>,
    /// Whether the logits use the embedding's weights; yes if left out.
    pub tied_embeddings: Option<bool>,
    /// Whether attention is one operation that keeps no scores for the backward, as FlashAttention
    /// (Dao et al. 2022) and libtorch's `scaled_dot_product_attention` are; no if left out.
    pub flash_attention: Option<bool>,
}

impl Transformer {
    fn check(&self) -> Result<()> {
        let sizes = [
            ("transformer.layers", self.layers),
            ("transformer.hidden", self.hidden),
            ("transformer.heads", self.heads),
            ("transformer.sequence", self.sequence),
            ("transformer.vocabulary", self.vocabulary),
            ("transformer.mlp", self.mlp.unwrap_or(1)),
        ];
        // Above this a product of sizes is no number that means anything.
        if let Some(&(field, value)) = sizes.iter().find(|(_, size)| !(1..=1 << 30).contains(size))
        {
            let need = "give a number from 1 to 2^30";
            return Err(Error::field(field, value, need));
        }
        if !self.hidden.is_multiple_of(self.heads) {
            let need = "give a number of heads that divides `hidden`";
            return Err(Error::field("transformer.heads", self.heads, need));
        }
        Ok(())
    }

    /// Returns the embedding, the blocks, and the logits. `element` is the size of an element in bytes.
    ///
    /// Parameters and operations are those of Narayanan et al. 2021 (equations 2 and 3). The bytes of
    /// activations are those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    /// Transformer Models" (section 4.1), with `element` in place of their 2 bytes. Masks of dropout
    /// have 1 byte.
    pub fn layers(&self, element: f64) -> Vec<Layer> {
        let [h, s, a, v] =
            [self.hidden, self.sequence, self.heads, self.vocabulary].map(|size| size as f64);
        let f = self.mlp.map_or(4.0 * h, |mlp| mlp as f64);
        let mask = if self.dropout.unwrap_or(true) { 1.0 } else { 0.0 };
        let scores = if self.flash_attention.unwrap_or(false) { 0.0 } else { 1.0 };
        let embedding = Layer {
            parameters: (v + s) * h,
            replicated_activations: mask * s * h,
            all_reduce: element * s * h,
            never_recomputed: true,
            ..Layer::default()
        };
        let block = Layer {
            repeat: Some(self.layers),
            // Matrices and biases of attention and MLP, and two layer norms.
            parameters: 4.0 * h * h + 2.0 * h * f + 9.0 * h + f,
            flops: 8.0 * s * h * h + 4.0 * s * h * f + 4.0 * s * s * h,
            gemm_size: Some(h.min(f)),
            rows: Some(s),
            input: element * s * h,
            // Queries, keys, values, the projection's input; the MLP's before and after GELU.
            activations: element * s * (4.0 * h + 2.0 * f),
            // Inputs of the layer norms; two masks.
            replicated_activations: (2.0 * element + 2.0 * mask) * s * h,
            // Inputs of attention and of the MLP.
            gathered_activations: 2.0 * element * s * h,
            // Softmax, its mask, and what dropout leaves of it.
            score_activations: scores * (element + mask * (element + 1.0)) * a * s * s,
            score_flops: scores * 4.0 * s * s * h,
            all_reduce: 2.0 * element * s * h,
            ..Layer::default()
        };
        let tied = self.tied_embeddings.unwrap_or(true);
        let logits = Layer {
            parameters: if tied { 0.0 } else { v * h },
            tied_parameters: if tied { v * h } else { 0.0 },
            flops: 2.0 * s * h * v,
            gemm_size: Some(h.min(v)),
            rows: Some(s),
            input: element * s * h,
            // In 4 bytes, for the loss.
            activations: 4.0 * s * v,
            replicated_activations: element * s * h,
            gathered_activations: element * s * h,
            never_recomputed: true,
            ..Layer::default()
        };
        vec![embedding, block, logits]
    }
}

/// The layers of a model, one after another.
#[derive(Clone, Debug)]
pub struct Model {
    /// The layers in order. Equal layers are written out: none has a `repeat`.
    pub layers: Vec<Layer>,
    /// The number that tensor parallelism must divide. With 1 the model has no tensor parallelism.
    pub tensor_parallel: usize,
}

/// The most layers that a model may have.
const MOST_LAYERS: usize = 10_000;

impl Model {
    /// Makes a transformer. `element` is the size of an element in bytes.
    ///
    /// # Errors
    /// A size of 0 or above 2^30, or heads that do not divide the features.
    pub fn transformer(shape: &Transformer, element: f64) -> Result<Self> {
        shape.check()?;
        Self::new(&shape.layers(element), shape.heads)
    }

    /// Makes a model of these layers. Tensor parallelism must divide `tensor_parallel`.
    ///
    /// # Errors
    /// No layers or more than 10,000, none with operations, or a number that is negative or not
    /// finite.
    pub fn new(layers: &[Layer], tensor_parallel: usize) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::field("layers", "[]", "give at least one layer"));
        }
        let mut all = Vec::new();
        for (index, layer) in layers.iter().enumerate() {
            layer.check(index)?;
            let count = layer.repeat.unwrap_or(1);
            if count > MOST_LAYERS - all.len() {
                return Err(Error::field("layers", count, "give at most 10,000 layers"));
            }
            let single = Layer { repeat: None, ..layer.clone() };
            all.extend(std::iter::repeat_n(single, count));
        }
        if !all.iter().any(|layer| layer.flops > 0.0) {
            return Err(Error::field("layers", "without `flops`", "at least one layer computes"));
        }
        if tensor_parallel == 0 {
            return Err(Error::field("tensor_parallel", 0, "give 1 for a model without it"));
        }
        Ok(Self { layers: all, tensor_parallel })
    }

    /// Divides the layers into stages, so that the largest stage has as few operations as it can.
    pub fn stages(&self, count: usize) -> Vec<Range<usize>> {
        let flops: Vec<f64> = self.layers.iter().map(|layer| layer.flops).collect();
        split(&flops, count)
    }

    /// Returns the number of all parameters.
    pub fn parameters(&self) -> f64 {
        self.layers.iter().map(|layer| layer.parameters).sum()
    }

    /// Returns the operations of forward and backward of one sample: three times the forward's. With
    /// full recomputation they are four times the forward's, except in layers that are never
    /// recomputed (Narayanan et al. 2021, equation 3).
    pub fn flops(&self, recomputes: bool) -> f64 {
        let mut flops = 0.0;
        for layer in &self.layers {
            let passes = if recomputes && !layer.never_recomputed { 4.0 } else { 3.0 };
            flops += passes * layer.flops;
        }
        flops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpt(layers: usize, hidden: usize, heads: usize) -> Transformer {
        let (sequence, vocabulary) = (2048, 51_200);
        let (mlp, dropout, tied_embeddings, flash_attention) = (None, None, None, None);
        Transformer {
            layers,
            hidden,
            heads,
            sequence,
            vocabulary,
            mlp,
            dropout,
            tied_embeddings,
            flash_attention,
        }
    }

    /// Table 1 of Narayanan et al. 2021: billions of parameters.
    #[test]
    fn parameters_are_those_of_the_papers_table() {
        let rows = [
            (1.7, 24, 2304, 24),
            (3.6, 30, 3072, 32),
            (7.5, 36, 4096, 32),
            (18.4, 40, 6144, 48),
            (39.1, 48, 8192, 64),
            (76.1, 60, 10_240, 80),
            (145.6, 80, 12_288, 96),
            (174.6, 96, 12_288, 96),
            (310.1, 96, 16_384, 128),
            (529.6, 105, 20_480, 128),
            (1008.0, 128, 25_600, 160),
        ];
        for (billions, layers, hidden, heads) in rows {
            let model = Model::transformer(&gpt(layers, hidden, heads), 2.0).unwrap();
            let rounded = (model.parameters() / 1e8).round() / 10.0;
            assert_eq!(rounded, billions, "{layers} layers of {hidden}");
        }
    }

    /// Equation 3 of Narayanan et al. 2021: F = 96 B s l h^2 (1 + s / 6h + V / 16lh).
    #[test]
    fn operations_are_those_of_the_papers_equation() {
        let model = Model::transformer(&gpt(96, 12_288, 96), 2.0).unwrap();
        let (s, l, h, v) = (2048.0, 96.0, 12_288.0, 51_200.0);
        let paper = 96.0 * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        assert!((model.flops(true) / paper - 1.0).abs() < 1e-12);
        // Korthikanti et al. 2022, equation 7: without what is recomputed.
        let paper = 72.0 * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
        assert!((model.flops(false) / paper - 1.0).abs() < 1e-12);
    }

    /// Korthikanti et al. 2022, table 2: s b h (10 + 24 + 5 a s / h) bytes of a block.
    #[test]
    fn activations_are_those_of_the_papers_table() {
        let shape = gpt(96, 12_288, 96);
        let block = &shape.layers(2.0)[1];
        let (s, h) = (2048.0, 12_288.0);
        assert_eq!(block.replicated_activations + block.gathered_activations, 10.0 * s * h);
        assert_eq!(block.activations, 24.0 * s * h);
        assert_eq!(block.score_activations, 5.0 * 96.0 * s * s);
        assert_eq!(block.input, 2.0 * s * h);
        let flash = Transformer { flash_attention: Some(true), ..shape };
        assert_eq!(flash.layers(2.0)[1].score_activations, 0.0);
    }

    #[test]
    fn bad_shapes_are_errors_that_name_the_field() {
        let message = |shape| Model::transformer(&shape, 2.0).unwrap_err().to_string();
        assert!(message(gpt(0, 8, 2)).starts_with("transformer.layers is 0"));
        assert!(message(gpt(1, 8, 3)).starts_with("transformer.heads is 3"));
        assert!(message(gpt(1 << 30, 8, 2)).contains("at most 10,000 layers"));
        let message = |layers: &[Layer]| Model::new(layers, 1).unwrap_err().to_string();
        assert_eq!(message(&[]), "layers is []: give at least one layer");
        assert!(message(&[Layer::default()]).contains("at least one layer computes"));
        let negative = Layer { flops: -1.0, ..Layer::default() };
        assert!(message(&[Layer::default(), negative]).starts_with("layers[1].flops is -1"));
    }
}
