//! Embeddings, and elements by their indices.

use tch::{Kind, Tensor};

use super::case::{Case, bools, case, ints, normal};

const INDEX: &[&str] = &["index"];
const PUT: &[&str] = &["index_put"];
const EMBEDDING: &[&str] = &["embedding", "embedding_dense_backward"];

pub fn cases() -> Vec<Case> {
    let table = || normal([9, 6]);
    vec![
        case("embedding", [table(), ints(9, [4, 5])], EMBEDDING, |x| {
            Tensor::embedding(&x[0], &x[1], -1, false, false)
        }),
        case("embedding of a word", [table(), ints(9, [])], EMBEDDING, |x| {
            Tensor::embedding(&x[0], &x[1], -1, false, false)
        }),
        case("embedding with padding", [table(), ints(9, [12])], EMBEDDING, |x| {
            Tensor::embedding(&x[0], &x[1], 3, false, false)
        }),
        case("embedding, scaled by frequency", [table(), ints(9, [12])], EMBEDDING, |x| {
            Tensor::embedding(&x[0], &x[1], -1, true, false)
        }),
        case("embedding beside an infinite row", [table(), ints(2, [3])], &["embedding"], |x| {
            let row = Tensor::from_slice(&[2_i64]).to_device(x[1].device());
            let table = x[0].index_fill(0, &row, f64::INFINITY);
            Tensor::embedding(&table, &x[1], -1, false, false)
        }),
        case("embedding of few words", [normal([2, 3]), ints(2, [3])], EMBEDDING, |x| {
            Tensor::embedding(&x[0], &x[1], -1, false, false)
        }),
        case("index_select", [normal([5, 6]), ints(5, [7])], &["index_select"], |x| {
            x[0].index_select(0, &x[1])
        }),
        case("index_select of columns", [normal([5, 6]), ints(6, [4])], &["index_select"], |x| {
            x[0].index_select(-1, &x[1])
        }),
        case("gather", [normal([5, 6]), ints(6, [5, 4])], &["gather", "scatter_add"], |x| {
            x[0].gather(1, &x[1], false)
        }),
        case("gather of fewer rows", [normal([5, 6]), ints(5, [3, 6])], &["gather"], |x| {
            x[0].gather(0, &x[1], false)
        }),
        case("gather of a part", [normal([5, 6]), ints(6, [3, 2])], &["gather"], |x| {
            x[0].gather(1, &x[1], false)
        }),
        case("scatter", [normal([5, 6]), normal([5, 6])], &["scatter"], |x| {
            let turned =
                Tensor::arange(6, (Kind::Int64, x[0].device())).flip([0i64]).expand([5, 6], false);
            x[0].scatter(1, &turned, &x[1])
        }),
        case("scatter a number", [normal([5, 6]), ints(6, [5, 1])], &["scatter"], |x| {
            x[0].scatter_value(1, &x[1], 2.5)
        }),
        case(
            "scatter_add",
            [normal([5, 6]), ints(6, [5, 4]), normal([5, 4])],
            &["scatter_add"],
            |x| x[0].scatter_add(1, &x[1], &x[2]),
        ),
        case("index", [normal([5, 6]), ints(5, [4])], INDEX, |x| x[0].index(&[Some(&x[1])])),
        case("index of columns", [normal([5, 6]), ints(6, [4])], INDEX, |x| {
            x[0].index(&[None, Some(&x[1])])
        }),
        case("index by two", [normal([5, 6]), ints(5, [4]), ints(6, [4])], INDEX, |x| {
            x[0].index(&[Some(&x[1]), Some(&x[2])])
        }),
        case(
            "index by two, apart",
            [normal([5, 4, 6]), ints(5, [3, 1]), ints(6, [4])],
            INDEX,
            |x| {
                vec![
                    x[0].index(&[Some(&x[1]), None, Some(&x[2])]),
                    x[0].transpose(0, 1).index(&[None, Some(&x[1]), Some(&x[2])]),
                ]
            },
        ),
        case("index by one", [normal([5, 6]), ints(5, [1])], INDEX, |x| x[0].index(&[Some(&x[1])])),
        case("index by three", [normal([5, 6]), ints(5, [3])], INDEX, |x| {
            x[0].index(&[Some(&x[1])])
        }),
        case("index by plain indices", [normal([5, 6])], INDEX, |x| {
            x[0].index(&[Some(Tensor::from_slice(&[0i64, 3, 3]))])
        }),
        case("index_put", [normal([5, 6]), normal([2, 6])], &["index_put"], |x| {
            let rows = Tensor::from_slice(&[0i64, 3]);
            x[0].index_put(&[Some(rows)], &x[1], false)
        }),
        case("index_put, added", [normal([5, 6]), ints(5, [7]), normal([7, 6])], PUT, |x| {
            vec![
                x[0].index_put(&[Some(&x[1])], &x[2], true),
                x[0].tr().index_put(&[None, Some(&x[1])], &x[2].tr(), true),
                x[0].index_put(&[Some(&x[1])], &x[2].select(0, 1), true),
            ]
        }),
        case("index_put in place", [normal([5, 6]), normal([6])], &["_index_put_impl"], |x| {
            let rows = Tensor::from_slice(&[0i64, 3]);
            (&x[0] * 2.0).internal_index_put_impl_(&[Some(rows)], &x[1], true, false)
        }),
        case("index_add", [normal([5, 6]), ints(5, [7]), normal([7, 6])], &["index_add"], |x| {
            x[0].index_add(0, &x[1], &x[2])
        }),
        case("index_add, index_copy of no rows", [normal([5, 6]), normal([0, 6])], &[], |x| {
            let none = Tensor::from_slice::<i64>(&[]);
            vec![x[0].index_add(0, &none, &x[1]), x[0].index_copy(0, &none, &x[1])]
        }),
        case("index_fill", [normal([5, 6]), ints(5, [2]), normal([])], &["index_fill"], |x| {
            vec![x[0].index_fill(0, &x[1], 2.5), x[0].index_fill_int_tensor(1, &x[1], &x[2])]
        }),
        // Without rules.
        case("index by a mask", [normal([5, 6]), bools([5])], &[], |x| x[0].index(&[Some(&x[1])])),
        case("masked_select", [normal([5, 6]), bools([5, 6])], &[], |x| x[0].masked_select(&x[1])),
        case("nonzero", [bools([5, 6])], &[], |x| x[0].nonzero()),
        case("take, take_along_dim", [normal([5, 6]), ints(30, [4]), ints(5, [2, 6])], &[], |x| {
            vec![x[0].take(&x[1]), x[0].take_along_dim(&x[2], 0)]
        }),
        case("one_hot", [ints(6, [5])], &[], |x| x[0].one_hot(6)),
        case(
            "select_scatter, slice_scatter",
            [normal([5, 6]), normal([6]), normal([2, 6])],
            &[],
            |x| vec![x[0].select_scatter(&x[1], 0, 2), x[0].slice_scatter(&x[2], 0, 1, 3, 1)],
        ),
        case("bincount, histc", [ints(6, [12]), normal([30]).constant()], &[], |x| {
            vec![x[0].bincount(None::<Tensor>, 6), x[1].histc(5)]
        }),
    ]
}
