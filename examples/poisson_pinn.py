"""Solve a Poisson problem with a neural network, by Gauss-Newton steps on per-sample gradients of the
residuals.

A physics-informed network u (Raissi et al. 2019) is to fulfil  -laplace u = f  inside the unit square and  u
= 0  on its boundary; with f = 2 pi^2 sin(pi x) sin(pi y) the solution is known: u = sin(pi x) sin(pi y). At
each point the network leaves a residual r_i, and training makes the sum of their squares small. Such losses
are badly conditioned: Adam takes thousands of steps to an error below a percent. With the gradient of *each*
residual, the Jacobian J (points x weights), a step can solve the least-squares problem

    (J^T J + damping) step = J^T r

instead: Gauss-Newton with damping, as Levenberg and Marquardt have it. (Energy natural gradients, Mueller &
Zeinhofer 2023, arXiv:2302.13163, take the same step with another inner product, and find the same jump in
accuracy.)

A row of J is a per-sample gradient of a loss that holds second derivatives of the network with respect to its
input. With pslayers that is ``ps.per_sample_grads(model, residual, points)``, and no word about second
derivatives. The same step, as  J^T (J J^T + damping) = (J^T J + damping) J^T,  is

    step = J^T w,   (J J^T + damping) w = r

a system in the points, however many weights there are (Guzman-Cordero et al. 2025, arXiv:2505.12149). It
needs J J^T and J^T w alone, and J is never formed: ``gram`` and ``weighted_sum`` of ``ps.factored``.

Run it (one to two minutes on one core), and see ``--help`` for the options:

    pip install '.[examples]'
    python examples/poisson_pinn.py

It prints the errors against the exact solution, draws where the methods err, and shows what a step in the
weights and one in the points hold and take, by the width of the network.

What was found (relative L2 errors, seeds 0 and 1, on one core that others used, too): 300 steps end at 2.4e-5
and 3.7e-5, in the weights and in the points alike, since they are the same steps; Adam, given the same 20 to
25 seconds, at 2.5e-3 and 9.9e-3. A network of width 128, in the points and in the same time, does 162 and 100
steps, and ends at 1.2e-5 and 1.0e-4: wider is no better at once. But it can be had: at width 128 a step in
the points holds 10 MiB and takes 0.1 to 0.2 seconds, where J and J^T J would be 2.2 GiB; at width 512
(264,705 weights) 36 MiB and a second, against 523 GiB.
"""

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"This example needs {(error.name or str(error)).split('.')[0]}: pip install '.[examples]'.")

import torch
from torch import Tensor, nn

import pslayers as ps

# points inside and on the boundary; how much a residual of the boundary counts
INSIDE, EDGE, WEIGHT = 400, 100, 10.0
NARROW, WIDTHS = 24, (24, 64, 128, 256, 512)
Curve = list[tuple[float, float]]  # (seconds, error)
Solve = Callable[[float], Tensor | None]  # a damping's step, of all weights one after the other


def network(width: int = NARROW) -> nn.Sequential:
    """697 parameters at the default width, in double precision: the errors get smaller than single precision
    resolves.
    """
    layers = nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    return layers.double()


def exact(x: Tensor) -> Tensor:
    """The solution, (B, 2) -> (B,)."""
    return torch.sin(math.pi * x).prod(1)


def inside(n: int) -> Tensor:
    """Random points of the square, (n, 2); they require a gradient, for the Laplacian."""
    return torch.rand(n, 2, dtype=torch.float64).requires_grad_()


def edge(n: int) -> Tensor:
    """Random points of its boundary, (n, 2)."""
    x = torch.rand(n, 2, dtype=torch.float64)
    side, at = torch.randint(0, 2, (n,)), torch.randint(0, 2, (n,)).double()
    x[torch.arange(n), side] = at
    return x


def laplacian(u: Tensor, x: Tensor) -> Tensor:
    """The sum of second derivatives of u (B, 1) at x (B, 2), one for each point, (B,)."""
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [
        torch.autograd.grad(slope[:, d].sum(), x, create_graph=True)[0][:, d] for d in range(x.shape[1])
    ]
    return torch.stack(second).sum(0)


def equation(u: Tensor, x: Tensor) -> Tensor:
    """What is left of -laplace u = f at each point."""
    return -laplacian(u, x) - 2 * math.pi**2 * exact(x)


def boundary(u: Tensor, x: Tensor) -> Tensor:
    """What is left of u = 0 at each point of the boundary."""
    return math.sqrt(WEIGHT) * u.squeeze(1)


def residuals(model: nn.Module, x: Tensor, b: Tensor) -> Tensor:
    """All residuals, so scaled that the sum of their squares is the loss."""
    return torch.cat([equation(model(x), x) / math.sqrt(len(x)), boundary(model(b), b) / math.sqrt(len(b))])


def jacobian(model: nn.Module, x: Tensor, b: Tensor) -> Tensor:
    """The gradient of every residual, (points, parameters)."""
    blocks = []
    for points, residual in ((x, equation), (b, boundary)):
        rows = ps.per_sample_grads(model, residual, points, points)  # {name: (B, *shape)}
        blocks.append(torch.cat([g.flatten(1) for g in rows.values()], 1) / math.sqrt(len(points)))
    return torch.cat(blocks)


def error_of(model: nn.Module) -> float:
    """The relative L2 error against the exact solution, on a grid of 101 x 101 points."""
    line = torch.linspace(0, 1, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    with torch.no_grad():
        return float((model(grid).squeeze(1) - exact(grid)).norm() / exact(grid).norm())


def solved(system: Tensor, right: Tensor, damping: float) -> Tensor | None:
    """What solves (system + damping) times it = right; None where that is singular to rounding."""
    root, failed = torch.linalg.cholesky_ex(system + damping * torch.eye(len(system), dtype=system.dtype))
    return None if failed else torch.cholesky_solve(right[:, None], root).squeeze(1)


def in_weights(model: nn.Module, x: Tensor, b: Tensor, r: Tensor) -> Solve:
    """The step for any damping, by a system (parameters, parameters)."""
    rows = jacobian(model, x, b)
    normal, right = rows.T @ rows, rows.T @ r
    return lambda damping: solved(normal, right, damping)


def factors(model: nn.Module, x: Tensor, b: Tensor) -> list[ps.FactoredGrads]:
    """The gradients of the residuals inside and on the boundary, not formed."""
    kept = []
    for points, residual in ((x, equation), (b, boundary)):
        with ps.factored(model, grad=False) as grads:
            residual(model(points), points).mean().backward()
        kept.append(grads)
    return kept


def in_points(model: nn.Module, x: Tensor, b: Tensor, r: Tensor) -> Solve:
    """The same by a system (points, points)."""
    inner, outer = factors(model, x, b)
    scale = torch.cat([t.new_full((len(t),), len(t) ** -0.5) for t in (x, b)])  # as in `residuals`
    between = inner.gram(outer)
    kernel = torch.cat([torch.cat([inner.gram(), between], 1), torch.cat([between.T, outer.gram()], 1)])
    kernel *= scale[:, None] * scale

    def step(damping: float) -> Tensor | None:
        weights = solved(kernel, r, damping)
        if weights is None:
            return None
        weights, weights_b = (weights * scale).split([len(x), len(b)])
        sums = outer.weighted_sum(weights_b)
        for name, part in inner.weighted_sum(weights).items():  # the last bias is not in the Laplacian
            sums[name] += part
        return torch.nn.utils.parameters_to_vector([sums[name] for name, _ in model.named_parameters()])

    return step


def gauss_newton(
    model: nn.Module, steps: int, solver: Callable[..., Solve], seconds: float, tick: Callable[[], object]
) -> Curve:
    """Damped Gauss-Newton steps on new random points each, as many as asked for or as the time allows; the
    damping follows how well the last step did.
    """
    params, damping, spent = list(model.parameters()), 1e-3, 0.0
    curve = [(0.0, error_of(model))]
    while len(curve) <= steps and spent < seconds:
        start = time.perf_counter()
        x, b = inside(INSIDE), edge(EDGE)
        with ps.recording(model, False):
            r = residuals(model, x, b).detach()
        solve = solver(model, x, b, r)
        before = torch.nn.utils.parameters_to_vector(params).detach()
        for _ in range(8):
            step, better = solve(damping), False
            if step is not None:
                torch.nn.utils.vector_to_parameters(before - step, params)
                with ps.recording(model, False):
                    better = bool(residuals(model, x, b).detach().square().sum() < r.square().sum())
            damping = max(damping / 3, 1e-14) if better else damping * 4
            if better:
                break
        else:
            torch.nn.utils.vector_to_parameters(before, params)
        spent += time.perf_counter() - start
        curve.append((spent, error_of(model)))
        tick()
    return curve


def adam(model: nn.Module, seconds: float, lr: float, tick: Callable[[float], object]) -> Curve:
    """Adam on as many points a step, for as long; its learning rate falls to zero along a cosine."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    curve, spent, count = [(0.0, error_of(model))], 0.0, 0
    while spent < seconds:
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * min(spent / seconds, 1)))
        optimizer.zero_grad()
        with ps.recording(model, False):  # needs no per-sample gradients
            residuals(model, inside(INSIDE), edge(EDGE)).square().sum().backward()
        optimizer.step()
        spent, count = spent + time.perf_counter() - start, count + 1
        tick(time.perf_counter() - start)
        if count % 50 == 0:
            curve.append((spent, error_of(model)))
    curve.append((spent, error_of(model)))
    return curve


def sizes(width: int, quick: bool) -> list[str]:
    """What each way holds and how long a step takes at a width: a row of the table."""
    model, points = ps.convert_model(network(width)), INSIDE + EDGE
    count = sum(p.numel() for p in model.parameters())
    held = sum(grads.nbytes for grads in factors(model, inside(INSIDE), edge(EDGE)))
    steps, seconds = 1 if quick else 3, ["", ""]
    for i, solver in enumerate((in_weights, in_points)):
        if i or count < 5000:
            seconds[i] = f"{gauss_newton(model, steps, solver, math.inf, lambda: None)[-1][0] / steps:.2f}"
    ways = [(8 * (points * count + count**2), seconds[0]), (held + 8 * points**2, seconds[1])]
    return [f"{count:,}", *(cell for size, spent in ways for cell in (f"{size / 2**20:,.0f}", spent))]


def picture(path: Path, models: dict[str, nn.Module], curves: dict[str, Curve]) -> None:
    """The errors on the square, and their way down."""
    line = torch.linspace(0, 1, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    figure, axes = plt.subplots(
        1, 1 + len(models), figsize=(4.5 * (1 + len(models)), 4), layout="constrained"
    )
    for name, curve in curves.items():
        axes[0].semilogy(*zip(*curve, strict=True), label=name)
    axes[0].set_xlabel("seconds")
    axes[0].set_ylabel("relative L2 error")
    axes[0].legend()
    for axis, (name, model) in zip(axes[1:], models.items(), strict=True):
        with torch.no_grad():
            off = (model(grid).squeeze(1) - exact(grid)).abs().reshape(101, 101)
        shown = axis.imshow(off.T.numpy(), origin="lower", extent=(0, 1, 0, 1))
        axis.set_title(f"{name}: |u - exact|")
        figure.colorbar(shown, ax=axis)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Train both, print their errors, draw; returns what was printed."""
    parser = argparse.ArgumentParser(
        description="A Poisson problem by a physics-informed network: Gauss-Newton against Adam."
    )
    parser.add_argument("--steps", type=int, default=300, help="Gauss-Newton steps (default 300)")
    parser.add_argument("--width", type=int, default=128, help="of a wider network (default 128)")
    parser.add_argument("--lr", type=float, default=3e-2, help="Adam's first learning rate (default 3e-2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and points (default 0)")
    parser.add_argument(
        "--output", type=Path, default=Path("poisson_pinn.png"), help="where the picture goes"
    )
    parser.add_argument("--quick", action="store_true", help="15 steps")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.lr <= 0 or options.width < 1:
        parser.error("--steps and --width must be at least 1, --lr above 0")
    steps = 15 if options.quick else options.steps

    torch.manual_seed(options.seed)
    first = ps.convert_model(network())
    wide = f"in points, width {options.width}"
    models: dict[str, nn.Module] = {"in weights": first, "in points": copy.deepcopy(first)}
    models |= {wide: ps.convert_model(network(options.width)), "Adam": copy.deepcopy(first)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    curves: dict[str, Curve] = {}
    seconds = math.inf  # the first has as long as it takes, the wide network and Adam have as long
    for name, solver in (("in weights", in_weights), ("in points", in_points), (wide, in_points)):
        torch.manual_seed(options.seed)  # of the points: the same for all
        with tqdm(total=steps, unit="step", desc=f"Gauss-Newton {name}") as bar:
            limit = seconds if name == wide else math.inf
            curves[name] = gauss_newton(models[name], steps, solver, limit, bar.update)
        seconds = curves["in weights"][-1][0]
    with tqdm(total=seconds, desc="Adam", bar_format="{l_bar}{bar}| {n:.1f}/{total:.1f} s") as bar:
        curves["Adam"] = adam(
            models["Adam"], seconds, options.lr, lambda passed: bar.update(min(passed, seconds - bar.n))
        )

    table = Table("method", title="Poisson problem on the unit square")
    for head in ("parameters", "relative L2 error", "steps", "seconds"):
        table.add_column(head, justify="right")
    found = {}
    for name, curve in curves.items():
        found[name] = {"error": curve[-1][1], "seconds": curve[-1][0]}
        count = sum(p.numel() for p in models[name].parameters())
        done = f"{len(curve) - 1}" if name != "Adam" else ""
        table.add_row(name, f"{count:,}", f"{curve[-1][1]:.1e}", done, f"{curve[-1][0]:.1f}")
    Console().print(table)
    print(f"The first weights' error is {curves['Adam'][0][1]:.1e}. Where they err: {options.output}")
    picture(options.output, models, curves)

    table = Table("width", title="A step in weights (J and J^T J), and in points (factors and J J^T)")
    for head in ("parameters", "in weights: MiB", "seconds", "in points: MiB", "seconds"):
        table.add_column(head, justify="right")
    for width in WIDTHS[:1] if options.quick else WIDTHS:
        table.add_row(str(width), *sizes(width, options.quick))
    Console().print(table)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # in layers this small, threads mostly wait for one another
    main()
