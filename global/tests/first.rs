use flow_global::{GlobalTensor, Placement, B, P, S};
use flow_tensor::ProcessGroup;
use tch::{nn, nn::Module, nn::OptimizerConfig, Device, Kind, Tensor};

fn ranks(size: usize, body: impl Fn(ProcessGroup) + Sync) {
    let groups = ProcessGroup::in_process(size).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            group.set_timeout(std::time::Duration::from_secs(20));
            let body = &body;
            scope.spawn(move || body(group));
        }
    });
}

#[test]
fn first() {
    ranks(2, |group| {
        let placement = Placement::new(&group, [0, 1]).unwrap();
        let x = flow_global::arange(20, Kind::Float, &placement, &[S(0)]).unwrap();
        println!("{:?} {:?} {:?}", x.size(), x.sbp(), x.to_local());
        let y = &x + 1;
        println!("{:?} {:?}", y.size(), y.sbp());
        println!("{:?}", y.full());
        let w = flow_global::randn([5, 8], Kind::Float, &placement, &[B])
            .unwrap()
            .set_requires_grad(true);
        let out = x.view([4, 5]).matmul(&w);
        println!("{:?} {:?}", out.size(), out.sbp());
        let loss = out.square().mean(Kind::Float);
        println!("{:?} {:?}", loss.size(), loss.sbp());
        loss.backward();
        println!("{:?} {:?}", w.grad().size(), w.grad().sbp());
        println!("{}", loss.double_value(&[]));
    });
}

#[test]
fn mlp() {
    let make = |seed: i64| {
        tch::manual_seed(seed);
        let vs = nn::VarStore::new(Device::Cpu);
        let net = nn::seq()
            .add(nn::linear(vs.root() / "a", 8, 16, Default::default()))
            .add_fn(|x| x.relu())
            .add(nn::linear(vs.root() / "b", 16, 4, Default::default()));
        (vs, net)
    };
    let x = Tensor::randn([12, 8], (Kind::Float, Device::Cpu));
    let t = Tensor::randint(4, [12], (Kind::Int64, Device::Cpu));
    let xv = Vec::<f32>::try_from(x.reshape([-1])).unwrap();
    let tv = Vec::<i64>::try_from(&t).unwrap();
    let (vs, net) = make(1);
    let mut opt = nn::Adam::default().build(&vs, 0.01).unwrap();
    for _ in 0..5 {
        opt.backward_step(&net.forward(&x).cross_entropy_for_logits(&t));
    }
    let want: Vec<(String, Vec<f32>)> = vs
        .variables()
        .into_iter()
        .map(|(n, t)| (n, Vec::try_from(t.reshape([-1])).unwrap()))
        .collect();
    let made: Vec<_> = (0..3).map(|_| std::sync::Mutex::new(Some(make(1)))).collect();
    for layout in 0..3 {
        let made: Vec<_> = (0..3).map(|_| std::sync::Mutex::new(Some(make(1)))).collect();
        let (want, xv, tv) = (&want, &xv, &tv);
        ranks(3, move |group| {
            let (vs, net) = made[group.rank()].lock().unwrap().take().unwrap();
            let placement = Placement::new(&group, [0, 1, 2]).unwrap();
            flow_global::distribute(&vs, &placement, |name, t| match layout {
                0 => vec![B],
                1 => vec![S(0)],
                _ if name == "a.weight" || name == "a.bias" => vec![S(0)],
                _ if name == "b.weight" => vec![S(1)],
                _ => vec![B],
            })
            .unwrap();
            let mut opt = nn::Adam::default().build(&vs, 0.01).unwrap();
            let x = Tensor::from_slice(xv).view([12, 8]);
            let t = Tensor::from_slice(tv);
            let (x, t) = tch::no_grad(|| {
                (
                    flow_global::scatter(&x, &placement, &[S(0)]).unwrap(),
                    flow_global::scatter(&t, &placement, &[S(0)]).unwrap(),
                )
            });
            for _ in 0..5 {
                opt.backward_step(&net.forward(&x).cross_entropy_for_logits(&t));
            }
            let variables = vs.variables();
            for (name, want) in want {
                let t = &variables[name];
                println!("{name} {:?}", t.sbp().unwrap());
                let got = Vec::<f32>::try_from(t.full().unwrap().reshape([-1])).unwrap();
                let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-5, "{name} {worst}");
            }
        });
    }
    drop(made);
    println!("{:?}", flow_global::gathered_operations());
}
