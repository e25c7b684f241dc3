"""Longer tests that CI leaves to the release check: one more form of a property that CI tries on other forms.

Each repeats for one more class, shape or draw what a test that stays in CI does for another. Most of their time is tracing.
`make release-tests` runs them, and so does `make release-check`.
"""

import pytest

MARK = "release"

FORMS: dict[str, tuple[str, ...]] = {
    # Exported: the strategies whose head is an equation, but one; SoftmaxHeads and twenty others stay.
    "tests/nn/test_export.py::test_an_exported_module_takes_any_batch_and_length": (
        *("ImplicitHeads", "TAPHeads", "EntmaxHeads", "MonotoneEquilibrium", "Equilibrium", "Equilibrium, by a sum"),
        *("EnergyTransformerStack", "Hopfield, by distances"),
    ),
    # Compiled: ops, the fixed point with three adjoints, attention and five energies stay.
    "tests/energy/test_conformance.py::test_compiled_is_eager": ("transformer", "two layers", "clustering"),
    "tests/energy/test_activation_conformance.py::test_compiled_is_eager": ("sparse atoms", "sphere", "RMSNorm"),
    "tests/posteriors/test_conformance.py::test_compiled_is_eager": (
        *("hidden Markov", "regression", "regression of unknown noise", "concepts"),
    ),
    "tests/population/test_conformance.py::test_compiled_is_eager": ("doubly stochastic",),
    "tests/measures/test_conformance.py::test_conforms_compiled": (
        *("gamma", "mixture of atoms and spins", "kernel density", "uniform", "poisson", "laplace"),
    ),
    "tests/measures/test_conformance.py::test_conforms_for_other_draws": (
        *(
            "sphere in eight dimensions",
            "sphere in five dimensions",
            "mixture of a batch",
            "atoms, two batch dimensions",
            "circle",
            "mixture of atoms and spins",
        ),
    ),
    "tests/energy/test_transformer.py::test_compiled": (),
    "tests/papers/theory/test_large_dimension.py::test_compiled": (),
    "tests/measures/test_coordinates.py::test_transforms_and_compilation": ("compiled",),
    "tests/nn/test_energy_transformer.py::test_compiled": (),
    "tests/nn/test_implicit.py::test_compiled": (),
    "tests/nn/test_spin.py::test_compiled": (),
    "tests/nn/test_sparse.py::test_compiled": (),
    "tests/nn/test_hopfield.py::test_compiled": (),
    "tests/nn/test_tap.py::test_compiled": (),
    "tests/test_duality.py::TestCompile::test_transforms_inside": (),
    "tests/test_duality.py::TestCompile::test_values_and_gradients": (),
    "tests/ops/test_transforms.py::test_compiled_for_any_length": ("all",),
    "tests/ops/test_documents.py::test_compiled": ("long and short keys",),
    "tests/ops/test_flex.py::test_compiled_gradients": (),
    "tests/ops/test_flex.py::test_it_is_proved_and_taken": ("keys-float32-eager",),
    "tests/nn/test_activation.py::test_compiled_is_eager": (),
    "tests/ops/test_window.py::test_compiled_with_any_length": ("auto-lengths0",),
    "tests/solve/test_compiled.py::test_compiled_once_for_all_sizes": (),
    "tests/solve/test_compiled.py::test_compiled_inside_transforms": ("hessian",),
    "tests/solve/test_compiled.py::test_other_dampings_compile_in_one_process": (),
    "tests/solve/test_compiled.py::test_compiled_without_a_compiler": ("Newton", "Anderson", "dense"),
    "tests/solve/test_linear_solve.py::test_compiled": (),
    "tests/solve/test_linear_solve.py::test_compiled_inside_transforms_and_unsolved": (),
    "tests/solve/test_nestings.py::test_triples": (),
    "tests/energy/test_entmax.py::test_a_compiled_transform_differentiates_in_alpha": (),
    "tests/probing/monitor/test_compiled.py::test_training_is_the_same_bit_for_bit_and_compiled_once_more": (
        *("in place", "layers"),
    ),
    "tests/probing/monitor/test_compiled.py::test_machine_code_trains_the_same_bit_for_bit": (),
    # Ended by a signal and resumed: a process of two that is killed stays, and Ctrl-C in tests of the command line.
    "tests/probing/session/test_course.py::test_a_terminated_command_is_resumed_to_the_last_bit": (),
    # Pages in a browser: the longest names, and an encoder and decoder, stay.
    "tests/report/test_browser.py::test_every_page_is_drawn_quietly_and_fits_its_width": ("large-400-light",),
    "tests/report/test_browser_drawing.py::test_numbers_on_the_map_tell_the_lowest_from_the_highest": ("0.001",),
    # At a size where memory that grew as the square would not fit.
    "tests/population/test_flow.py::test_a_hundred_thousand_tokens_in_linear_memory": (),
    "tests/papers/experiments/test_arms.py::test_two_processes_train_one_model": (),
    "tests/probing/monitor/test_processes.py::test_compiled_training_of_two_processes_is_watched_and_clipped": (),
    # Claims at settings beside their own, as the release check has them at 40 seeds; quick runs of three experiments.
    "tests/papers/claims/test_claims.py::test_the_claim_holds_for_other_settings": (),
    "tests/papers/experiments/test_experiments.py::test_quick_runs_end_with_every_quantity_that_is_judged": (
        *("climb", "collective", "whole-model"),
    ),
    # Examples that train for longest; eighteen stay.
    "tests/test_examples.py::test_spins_attend": (),
    "tests/test_examples.py::test_masked_digits_are_completed_down_an_energy": (),
    "tests/test_examples.py::test_language_models_train": (),
    # Many draws in half precision; the reference's stay.
    "tests/ops/test_backends.py::test_all_of_log_zs_gradient_arrives": ("flash-bfloat16-0.001", "fused-bfloat16-0.001"),
    # The largest of several orders.
    "tests/ops/test_bessel.py::test_value_two_derivatives_and_entropy": ("4096",),
    # Another checker of types than CI's own.
    "tests/test_typing_samples.py::test_samples_pass": ("mypy",),
    # Many draws: false findings are counted on sums of random heads, and of findings and alarms, in each run of CI.
    "tests/probing/session/test_draws.py::test_few_random_models_are_announced": (),
    "tests/probing/statistics/test_group_errors.py::test_two_halves_of_a_text_are_told_apart_in_few_places": (),
    # Random models of a class without building one: four classes stay, among them MiniLM's.
    "tests/probing/model/test_drawn.py::test_draws_have_the_law_of_whole_models": ("t5", "bert"),
}
"""By test the names of its cases; all of them where none is named."""
SHARDED = "tests/ops/test_sharded.py"
"""Where each test is tried by two processes and by four: CI has two."""


def in_release_alone(item: pytest.Item) -> bool:
    """Whether CI leaves the test out."""
    test, _, case = item.nodeid.removesuffix("]").partition("[")
    if test.partition("::")[0] == SHARDED and case.partition("-")[0] == "4":
        return True
    return test in FORMS and (not FORMS[test] or case in FORMS[test])
