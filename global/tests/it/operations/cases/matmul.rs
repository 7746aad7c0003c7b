//! Products of matrices.

use tch::{Kind, Tensor};

use super::case::{Case, case, normal};

pub fn cases() -> Vec<Case> {
    let product = |x: &[Tensor]| x[0].matmul(&x[1]);
    let linear = |x: &[Tensor]| x[0].linear(&x[1], Some(&x[2]));
    vec![
        case("mm", [normal([5, 6]), normal([6, 7])], &["mm"], product),
        case("mm of even sizes", [normal([4, 6]), normal([6, 12])], &["mm"], product),
        case("mm of one row", [normal([1, 6]), normal([6, 1])], &["mm"], product),
        case("mm of no rows", [normal([0, 6]), normal([6, 4])], &["mm"], product),
        case("mm over nothing", [normal([4, 0]), normal([0, 5])], &["mm"], product),
        case(
            "mm of transposed",
            [normal([5, 6]).transposed(), normal([6, 7]).transposed()],
            &["mm"],
            product,
        ),
        case(
            "mm in f32",
            [normal([5, 6]).kind(Kind::Float), normal([6, 7]).kind(Kind::Float)],
            &["mm"],
            product,
        ),
        case(
            "mm in bf16",
            [normal([5, 6]).kind(Kind::BFloat16), normal([6, 7]).kind(Kind::BFloat16)],
            &["mm"],
            product,
        ),
        case(
            "mm of ints",
            [super::case::ints(5, [5, 6]), super::case::ints(5, [6, 7])],
            &["mm"],
            product,
        ),
        case("bmm", [normal([5, 4, 6]), normal([5, 6, 3])], &["bmm"], |x| x[0].bmm(&x[1])),
        case("matmul of 3 by 2 dimensions", [normal([3, 5, 6]), normal([6, 4])], &["mm"], product),
        case("matmul of 2 by 3 dimensions", [normal([5, 6]), normal([3, 6, 4])], &["mm"], product),
        case(
            "matmul, batches are broadcast",
            [normal([3, 1, 4, 6]), normal([2, 6, 5])],
            &["bmm"],
            product,
        ),
        case("addmv", [normal([5]), normal([5, 6]), normal([6])], &["addmv"], |x| {
            vec![x[0].addmv(&x[1], &x[2]), x[0].sum(Kind::Double).addmv(&x[1], &x[2])]
        }),
        case("addr", [normal([6]), normal([5]), normal([6])], &["addr"], |x| {
            vec![x[0].addr(&x[1], &x[2]), x[0].expand([5, 6], false).addr(&x[1], &x[2])]
        }),
        case("matmul by a vector", [normal([5, 6]), normal([6])], &["mv"], product),
        case("matmul of vectors", [normal([6]), normal([6])], &["dot"], product),
        case("a vector by matmul", [normal([5]), normal([5, 6])], &["mm"], product),
        case("addmm", [normal([5, 7]), normal([5, 6]), normal([6, 7])], &["addmm"], |x| {
            x[0].addmm(&x[1], &x[2])
        }),
        case(
            "addmm of a column",
            [normal([5, 1]), normal([5, 6]), normal([6, 7])],
            &["addmm"],
            |x| x[0].addmm(&x[1], &x[2]),
        ),
        case(
            "baddbmm",
            [normal([5, 4, 3]), normal([5, 4, 6]), normal([5, 6, 3])],
            &["baddbmm"],
            |x| x[0].baddbmm(&x[1], &x[2], 0.5, 2.0),
        ),
        case(
            "baddbmm of a row",
            [normal([3]), normal([5, 4, 6]), normal([5, 6, 3])],
            &["baddbmm"],
            |x| x[0].baddbmm(&x[1], &x[2], 0.5, 2.0),
        ),
        case("linear", [normal([5, 6]), normal([7, 6]), normal([7])], &["addmm", "t"], linear),
        case(
            "linear of 3 dimensions",
            [normal([2, 5, 6]), normal([7, 6]), normal([7])],
            &["addmm"],
            linear,
        ),
        case("linear without bias", [normal([5, 6]), normal([7, 6])], &["mm"], |x| {
            x[0].linear(&x[1], None::<Tensor>)
        }),
        case(
            "two layers",
            [normal([5, 6]), normal([8, 6]), normal([8]), normal([4, 8])],
            &["mm"],
            |x| x[0].linear(&x[1], Some(&x[2])).relu().linear(&x[3], None::<Tensor>),
        ),
        case("outer", [normal([5]), normal([6])], &["mul"], |x| x[0].outer(&x[1])),
        case("einsum of matrices", [normal([5, 6]), normal([6, 4])], &["bmm"], |x| {
            Tensor::einsum("ij,jk->ki", x, None::<i64>)
        }),
        case("einsum of batches", [normal([2, 3, 5, 4]), normal([2, 3, 6, 4])], &["bmm"], |x| {
            Tensor::einsum("bhqd,bhkd->bhqk", x, None::<i64>)
        }),
        case("einsum of a trace", [normal([5, 5])], &["sum"], |x| {
            Tensor::einsum("ii->i", x, None::<i64>)
        }),
    ]
}
