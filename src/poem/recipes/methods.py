"""Every method as a recipe. A new method is a new recipe here; a new idea is a new part in `parts/`.

Methods of other packages are recipes too: `package.module:name`, or a name that a package announces in the group
`poem.methods` (`poem._util.outside`), each a `Recipe` or a function that returns one.

`HOST+poem` adds exploration and the adapt branch to a host method, `HOST+poem-i` exploration alone, `HOST+poem-ii` the
branch alone, and `HOST*` repeats the host's update without selecting again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from poem._util import outside
from poem._util.nearest import nearest_names
from poem.parts.augment import AugMix
from poem.parts.bank import MemoryBank
from poem.parts.base import Part
from poem.parts.bootstrap import SelfBootstrap
from poem.parts.branch import AdaptBranch
from poem.parts.exploration import Explore, Repeat
from poem.parts.matching import MatchEntropy
from poem.parts.objective import (
    ConservativeEntropy,
    Consistency,
    CrossEntropy,
    Entropy,
    FisherAnchor,
    FollowSource,
    FollowTeacher,
    MarginalEntropy,
    NearSource,
    RobustCrossEntropy,
    SiameseEntropy,
    SoftLikelihoodRatio,
)
from poem.parts.parameters import Everything, NormAffine, Nothing
from poem.parts.ranking import RankedEntropy
from poem.parts.readout import Laplacian, LocalPrior, Prior, Readout, Recentre
from poem.parts.recovery import (
    AverageWithSource,
    EachImage,
    EveryCalls,
    LossAverageBelow,
    MomentumFilter,
    StochasticRestore,
)
from poem.parts.region import RegionalEntropy, RegionConfidence
from poem.parts.score import OpinionEntropy
from poem.parts.selection import AfterImages, Diverse, EntropyBelow, Everyone, NotRedundant, PLPDAbove, Select
from poem.parts.statistics import Mixed, Robust, Source
from poem.parts.step import SAM, SGD, Adam
from poem.parts.stream_statistics import Blended
from poem.parts.teacher import MeanTeacher, SlowTeacher, WaryTeacher
from poem.parts.weighting import ByDiversityAndCertainty, ByEntropy, ByPLPD, FirstRound
from poem.recipes.learning_rate import FamilyRate, Rule
from poem.recipes.recipe import Recipe

Preset = Literal["imagenet", "cifar", "cifar10", "cifar100"]
KEEP_CONSTANTS = ("spa", "rem", "protected", "petta")
"""Methods whose constants are the same under every preset."""
SAME_PRESET = {"cifar10": "cifar"}
"""Second names of presets."""
SHALLOW = NormAffine("excluded")
DOUBLED = Rule(double_one=True)


def source() -> Recipe:
    """The model as it came: source statistics, no update.

    Paper: none; the row every table starts with.
    Reference code: none.
    Differs: none.
    """
    return Recipe(parameters=Nothing(), statistics=Source())


def bn() -> Recipe:
    """Batch statistics instead of the source's, nothing else.

    Paper: Nado et al. 2020; Schneider et al., NeurIPS 2020.
    Reference code: DequanWang/tent, norm.py (MIT).
    Differs: none.
    """
    return Recipe(parameters=Nothing())


def tent() -> Recipe:
    """Minimises the entropy of every sample, through scale and shift of the norm layers.

    Paper: Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021.
    Reference code: DequanWang/tent (MIT).
    Differs: group and layer norms move too; a loss that is not finite is skipped; eval mode throughout.
    """
    return Recipe()


def tent_filtered() -> Recipe:
    """Tent on samples of low entropy: what `tent+poem` starts from, so that tables can tell the filter from POEM.

    Paper: the filter is EATA's (Niu et al., ICML 2022).
    Reference code: none.
    Differs: not a published method.
    """
    return replace(tent(), select=EntropyBelow(0.4))


def eta() -> Recipe:
    """Reliable and not redundant samples, weighted by certainty.

    Paper: Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022.
    Reference code: mr-eggplant/EATA (MIT).
    Differs: group and layer norms move too; the learning rate follows the family and the batch size, by SAR's rule (the
    code has 0.00025 throughout); the average prediction is cleared by a reset; eval mode throughout.
    """
    return replace(tent(), select=EntropyBelow(0.4) & NotRedundant(0.05), weigh=ByEntropy(0.4))


def eata() -> Recipe:
    """ETA with an anchor: parameters important on source data change less. Without `source_data` it runs as ETA.

    Paper: Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022.
    Reference code: mr-eggplant/EATA (MIT).
    Differs: group and layer norms move too; the learning rate follows the family and the batch size, by SAR's rule (the
    code has 0.00025 throughout); the average prediction is cleared by a reset; importance is measured on the first 2000
    images given, so a tensor sorted by class should be shuffled first; eval mode throughout.
    """
    return replace(eta(), minimise=Entropy() + FisherAnchor(2000.0))


def sar() -> Recipe:
    """Reliable samples, a sharpness-aware step, and a reset when the loss says collapse.

    Paper: Niu et al., "Towards Stable Test-Time Adaptation in Dynamic Wild World", ICLR 2023.
    Reference code: mr-eggplant/SAR (BSD-3).
    Differs: an empty selection makes no step (`step=SAM(0.05, momentum_coast=True)` steps by the momentum, as the code
    does); a reset forgets the loss average and the inner momentum too; eval mode throughout.
    """
    return Recipe(
        parameters=SHALLOW, select=EntropyBelow(0.4), step=SAM(0.05), lr=DOUBLED, recover=LossAverageBelow(0.2)
    )


def deyo() -> Recipe:
    """Samples of low entropy whose prediction depends on shape: destroying it must lower their confidence.

    Paper: Lee et al., "Entropy is not Enough for Test-Time Adaptation", ICLR 2024.
    Reference code: Jhyun17/DeYO (MIT).
    Differs: one permutation per image per batch; PLPD above 0.2 throughout (its script uses 0.3 for batch-norm
    networks in the mild setting: `select=EntropyBelow(0.5) & PLPDAbove(0.3)`); eval mode throughout.
    """
    return Recipe(
        parameters=SHALLOW,
        select=EntropyBelow(0.5) & PLPDAbove(0.2),
        weigh=ByEntropy(0.4) + ByPLPD(),
        lr=DOUBLED,
    )


def roid() -> Recipe:
    """Diverse and certain samples, a ratio loss that does not vanish, consistency, and averaging with the source.

    Paper: Marsden et al., "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior
    Correction", WACV 2024.
    Reference code: mariodoebler/test-time-adaptation (MIT).
    Differs: a batch whose predictions are all alike is weighted equally; the published code divides by zero.
    """
    return Recipe(
        select=Diverse(),
        weigh=ByDiversityAndCertainty(),
        minimise=SoftLikelihoodRatio() + Consistency(),
        step=SGD(nesterov=True),
        lr=0.00025,
        recover=AverageWithSource(0.99),
        readout=Readout("first", Prior()),
    )


def memo() -> Recipe:
    """One image at a time: minimises the entropy of its mean prediction over many views, then resets.

    Paper: Zhang et al., "MEMO: Test Time Robustness via Adaptation and Augmentation", NeurIPS 2022.
    Reference code: zhangmarvin/memo (MIT).
    Differs: batches are taken image by image, as a batch has no meaning here.
    """
    return Recipe(
        parameters=Everything(),
        statistics=Mixed(1 / 17),
        views=AugMix(views=64),
        minimise=MarginalEntropy(),
        step=SGD(momentum=0.0),
        lr=0.00025,
        recover=EachImage(),
        readout=Readout("last"),
    )


def cotta() -> Recipe:
    """A student follows a teacher, its own slow average; now and then a weight is set back to its source value.

    Paper: Wang et al., "Continual Test-Time Domain Adaptation", CVPR 2022.
    Reference code: qinenergy/cotta (MIT).
    Differs: augmented passes are spent only where they are used (the code for CIFAR always makes them); eval mode
    throughout.
    """
    return Recipe(
        parameters=Everything("weight-and-bias"),
        teacher=MeanTeacher(),
        minimise=FollowTeacher(symmetric=True),
        step=SGD(nesterov=True),
        lr=0.01,
        recover=StochasticRestore(0.001),
        readout=Readout("teacher"),
    )


def rdumb() -> Recipe:
    """ETA with a reset every 1000 batches.

    Paper: Press et al., "RDumb: A simple approach that questions our progress in continual test-time adaptation",
    NeurIPS 2023.
    Reference code: oripress/CCC (MIT).
    Differs: group and layer norms move too; the learning rate follows the family and the batch size, by SAR's rule (the
    code has 0.00025 throughout); the margin follows the number of classes; eval mode throughout.
    """
    return replace(eta(), recover=EveryCalls(1000))


def lame() -> Recipe:
    """No update: predictions of neighbours in feature space are made to agree.

    Paper: Boudiaf et al., "Parameter-free Online Test-time Adaptation", CVPR 2022.
    Reference code: fiveai/LAME; affinity as in mariodoebler/test-time-adaptation (MIT).
    Differs: answers log-probabilities; a batch of one or two is answered as it is.
    """
    return Recipe(parameters=Nothing(), statistics=Source(), readout=Readout("first", Laplacian()))


def rotta() -> Recipe:
    """A student learns from a bank of recent, certain images what a slow teacher predicts; the teacher answers.

    Paper: Yuan et al., "Robust Test-Time Adaptation in Dynamic Scenarios", CVPR 2023.
    Reference code: BIT-DA/RoTTA (MIT), as in mariodoebler/test-time-adaptation (MIT).
    Differs: one update per batch at most (the code makes one for each 64 images that came); group and layer norms are
    adapted too; eval mode throughout.
    """
    return Recipe(
        statistics=Robust(0.05),
        views=MemoryBank(),
        teacher=SlowTeacher(),
        minimise=FollowTeacher(symmetric=False),
        step=Adam(),
        lr=0.001,
        readout=Readout("teacher"),
    )


def come() -> Recipe:
    """Tent with the entropy of an opinion that leaves room for not knowing.

    Paper: Zhang et al., "COME: Test-time Adaption by Conservatively Minimizing Entropy", ICLR 2025.
    Reference code: BlueWhaleLab/COME (no licence).
    Differs: the number of classes is the network's (the code has 1000); with `+poem` the opinion is of the mean of both
    heads' logits, and the filter compares its entropy with 0.4 ln C; eval mode throughout.
    """
    return replace(tent(), minimise=ConservativeEntropy())


def zerosiam() -> Recipe:
    """Minimises the entropy behind a trained predictor that must stay near the plain head.

    Paper: "ZeroSiam", ICLR 2026, arXiv 2509.23183.
    Reference code: Cascol-Chen/ZeroSiam (no licence).
    Differs: the rates are those for ResNet-50-GN (convolutional) and ViT-B (transformer), by SAR's rule for the batch
    size; the code has others for smaller networks.
    """
    rate = Rule(double_one=True, convolutional=0.0025, transformer=0.005)
    return replace(tent(), minimise=SiameseEntropy(), lr=rate)


def spa() -> Recipe:
    """Damaged views of each image learn what the intact image shows, through a trained predictor.

    Paper: "Self-Bootstrapping for Versatile Test-Time Adaptation" (SPA), ICML 2025.
    Reference code: mr-eggplant/SPA (NTUITIVE licence, not for commercial use; not copied).
    Differs: the constants are those for ResNet-50-GN (convolutional) and ViT-B (transformer); masks follow the image's
    size; the amounts of noise start at the scale that they are kept at; no step where no prediction became less sure.
    """
    return replace(tent(), minimise=SelfBootstrap(), lr=FamilyRate(convolutional=0.0025, transformer=0.01))


def rem() -> Recipe:
    """Masks what a vision transformer attends to: such views must agree with the whole image and be no surer.

    Vision transformers alone; any other network is refused.

    Paper: "Ranked Entropy Minimization for Continual Test-Time Adaptation" (REM), ICML 2025.
    Reference code: pilsHan/rem (MIT).
    Differs: what does not move gets no gradient (the code lets these pile up); blocks are found by the network's shape.
    """
    return Recipe(parameters=SHALLOW, minimise=RankedEntropy(), step=Adam(), lr=0.001)


def rpl() -> Recipe:
    """Hard pseudo-labels for every sample, with a loss that wrong ones move less than the cross-entropy does.

    Paper: Rusak et al., "If your data distribution shifts, use self-learning", TMLR 2022.
    Reference code: oripress/CCC (MIT).
    Differs: group and layer norms move too; a loss that is not finite is skipped.
    """
    return replace(tent(), minimise=RobustCrossEntropy(), lr=0.0005)


def cmf() -> Recipe:
    """ROID whose weights are pulled to a hidden copy, itself a Kalman filter between the source and the weights.

    Paper: Lee et al., "Continual Momentum Filtering on Parameter Space for Online Test-time Adaptation", ICLR 2024.
    Reference code: mariodoebler/test-time-adaptation (MIT).
    Differs: as `roid`; a reset forgets the filter's variance too; with a branch each group has a filter of its own.
    """
    return replace(roid(), recover=MomentumFilter())


def recap() -> Recipe:
    """Samples certain in a whole region of features, where the prediction is to be certain and to change little.

    Paper: "ReCAP", ICML 2025, arXiv 2505.20704, second-hand: neither its text nor its code could be read, and the
    formulas, the threshold, the bound on weights and the rates are as a later paper restates them.
    Reference code: none read; its licence is not established.
    Differs: threshold and bound are one each (0.8 ln C and 3, those told for ResNet-50-GN; for ViT-B they are ln C and
    1.5); answers come from before the update and nothing resets, which is not established either.
    """
    score = RegionalEntropy()
    return Recipe(
        parameters=SHALLOW,
        select=EntropyBelow(0.8, score=score),
        weigh=ByEntropy(0.8, score=score, most=3.0),
        minimise=RegionConfidence(score=score),
    )


def protected() -> Recipe:
    """Brings entropies back to those of source data, as far as betting on the difference has gained.

    Its authors call it POEM too, *Protected Online Entropy Matching*: another idea by other people.

    Paper: Bar, Shaer, Romano, "Protected Test-Time Adaptation via Online Entropy Matching: A Betting Approach",
    NeurIPS 2024.
    Reference code: yarinbar/poem (no licence).
    Differs: no temperature (the code divides logits by 0.90 for ResNet-50-GN and 1.025 for ViT-B); source entropies are
    of the first 2000 images given, by the statistics of the recipe; nothing selected means no step; every reset forgets
    the bets too; the threshold follows the number of classes.
    """
    return Recipe(
        parameters=SHALLOW,
        select=AfterImages(100) & EntropyBelow(0.4),
        weigh=ByEntropy(0.4),
        minimise=MatchEntropy(),
    )


def petta() -> Recipe:
    """RoTTA's bank and statistics; the further the teacher's features have drifted, the less it follows the student.

    Paper: "Persistent Test-time Adaptation in Recurring Testing Scenarios" (PeTTA), NeurIPS 2024.
    Reference code: hthieu166/petta (no licence).
    Differs: the loss is that for ImageNet on every data set; source means and variances are of the first 2000 images
    given, and classes with less than two of them do not count; group and layer norms are adapted too.
    """
    return replace(
        rotta(),
        views=MemoryBank(every=1, by_age=False),
        teacher=WaryTeacher(),
        minimise=FollowTeacher(symmetric=False) + FollowSource() + NearSource(),
    )


def neo() -> Recipe:
    """No update: features are centred by the stream's mean before the last layer.

    Paper: "NEO", ICLR 2026, arXiv 2510.05635.
    Reference code: awesomealex1/NEO (no licence).
    Differs: `adapter.frozen()` answers with the batch in the mean. Evaluated on vision transformers; a first batch of
    one image is answered by the bias alone.
    """
    return Recipe(parameters=Nothing(), statistics=Source(), readout=Readout("first", Recentre()))


def poem() -> Recipe:
    """Selects again after each update and updates on samples reliable now; source and adapt branch answer together.

    Paper: Yi et al., "POEM: Explore Unexplored Reliable Samples to Enhance Test-Time Adaptation", Algorithm 1.
    Reference code: ycarobot/POEM (no licence; cannot run).
    Differs: two updates at most (the text; the algorithm's bound allows three); an empty set ends the batch; both
    gradients come from one forward pass; the threshold follows the number of classes; eval mode throughout.
    """
    return Recipe(
        parameters=SHALLOW,
        select=EntropyBelow(0.4),
        lr=DOUBLED,
        explore=Explore(2),
        branch=AdaptBranch(),
        readout=Readout("last"),
    )


def poem_official() -> Recipe:
    """What the authors' code does for single and mixed shifts, with its mistakes mended.

    Paper: Yi et al., as `poem`; the selection, weights and reset are in the code alone.
    Reference code: ycarobot/POEM, methods/POEM.py (no licence; cannot run).
    Differs: PLPD and the redundancy test read the mixture throughout (the code reads the source branch in places), and
    PLPD has one permutation per image per batch; the branch minimises the cross-entropy of its own logits to the
    mixture's label (the code raises a probability: the branch's of its own label, then the mixture's of the mixture's);
    both groups step from one pass (the code runs and selects again in between); gradients do not leak between the
    groups; the first batch updates the branch too; the loss average is kept; a batch that resets answers after its
    update (the code: before); sets are compared instead of their sizes; a reset clears both optimisers and the average
    prediction; the threshold follows the number of classes; eval mode throughout.
    """
    return replace(
        poem(),
        select=EntropyBelow(0.4) & PLPDAbove(0.2) & NotRedundant(0.2),
        weigh=FirstRound(ByEntropy(0.4) + ByPLPD()),
        recover=LossAverageBelow(0.2, of="first"),
        branch=AdaptBranch(combine="logits"),
    )


def poem_official_v2() -> Recipe:
    """What the authors' code does for batch size 1 and label shift, with its mistakes mended.

    Paper: Yi et al., as `poem`; the selection and weights are in the code alone.
    Reference code: ycarobot/POEM, methods/POEMv2.py (no licence; cannot run).
    Differs: as `poem-official` in PLPD, the mixture's label for the branch, one pass for both groups, gradients, sets,
    the number of classes and eval mode; nothing selected means no step, where the code lowers the whole batch's
    entropy; a small loss is a loss like any other, where the code makes no update and answers with the source branch.
    """
    return replace(
        poem(),
        select=EntropyBelow(0.4, first=0.5) & PLPDAbove(0.2),
        weigh=FirstRound(ByEntropy(0.4) + ByPLPD()),
        branch=AdaptBranch(combine="logits"),
    )


def auto() -> Recipe:
    """Statistics and prior from the stream, ETA, and POEM where it helps: one method for every network.

    On group and layer norm it is ETA with POEM's exploration and branch; with ImageNet's constants updates are smaller
    where fewer than half the configured batch size are selected. On batch norm the statistics of the stream are what
    counts: `Blended`. No weight moves there, since updates gained nothing on average and lost ten points on one of two
    networks where images of noise came between. Both answer with a prior from the last images. `poem.adapt` takes the
    constants that fit the number of classes; with `guard=True` the source answers beside it.

    Paper: none; ETA (Niu et al., ICML 2022) and POEM (Yi et al.) are its parts, and `docs/methods/auto.md` tells how
    its constants were chosen and how far each part helps.
    Reference code: none.
    Differs: not a published method.
    """
    answered = LocalPrior()
    plain = Recipe(parameters=Nothing(), statistics=Blended(), readout=Readout("first", answered))
    learnt = replace(with_poem(eta()), minimise=Entropy(least=0.5), branch=AdaptBranch(teach=CrossEntropy(least=0.5)))
    return replace(learnt, readout=Readout("last", answered), on_batch_norm=plain)


METHODS: dict[str, Callable[[], Recipe]] = {
    "auto": auto,
    "source": source,
    "bn": bn,
    "tent": tent,
    "tent-filtered": tent_filtered,
    "eta": eta,
    "eata": eata,
    "sar": sar,
    "deyo": deyo,
    "roid": roid,
    "memo": memo,
    "cotta": cotta,
    "rdumb": rdumb,
    "lame": lame,
    "rotta": rotta,
    "come": come,
    "zerosiam": zerosiam,
    "spa": spa,
    "rem": rem,
    "rpl": rpl,
    "cmf": cmf,
    "recap": recap,
    "protected": protected,
    "petta": petta,
    "neo": neo,
    "poem": poem,
    "poem-official": poem_official,
    "poem-official-v2": poem_official_v2,
}
HOSTS = (
    "tent", "tent-filtered", "eta", "eata", "sar", "deyo", "roid", "memo", "cotta", "rdumb", "come", "rpl", "cmf",
    "recap", "protected", "rem",
)  # fmt: skip
"""Methods that take POEM's parts; `rotta` and `petta` learn from a bank, `zerosiam` and `spa` through one head,
and take none."""


def with_poem(host: Recipe) -> Recipe:
    """Exploration and the adapt branch on top of a host."""
    return with_branch(with_exploration(host))


def with_exploration(host: Recipe) -> Recipe:
    """POEM-I: the host's own selection, made again after each update; answers after the last."""
    return replace(host, select=_filter(host), explore=Explore(2), readout=replace(host.readout, which="last"))


def with_branch(host: Recipe) -> Recipe:
    """POEM-II: the adapt branch, updated on the host's own selection; answers after the update."""
    return replace(host, select=_filter(host), branch=AdaptBranch(), readout=replace(host.readout, which="last"))


def _filter(host: Recipe) -> Select:
    """The host's selection, or the entropy filter where Tent has none, so that there is something to explore."""
    if host.select != Everyone() or host.views is not None or host.teacher is not None:
        return host.select
    conservative = isinstance(host.minimise, ConservativeEntropy)
    return EntropyBelow(0.4, score=OpinionEntropy()) if conservative else EntropyBelow(0.4)


def iterated(host: Recipe) -> Recipe:
    """The host's update twice, on the samples selected first; answers after the last."""
    return replace(host, explore=Repeat(2), readout=replace(host.readout, which="last"))


SUFFIXES: dict[str, Callable[[Recipe], Recipe]] = {
    "+poem": with_poem,
    "+poem-i": with_exploration,
    "+poem-ii": with_branch,
    "*": iterated,
}


def recipe(name: str, preset: Preset = "imagenet") -> Recipe:
    """The recipe of a method by name: a method, or a host with `+poem`, `+poem-i`, `+poem-ii` or `*`.

    Args:
        name: One of `methods()`, or `package.module:name` of a `Recipe` or of a function that returns one.
        preset: Published constants for other data. An outside function gets it if it has a parameter `preset`; an
            outside recipe is taken as it is.

    Raises:
        ValueError: An unknown name, or a module that cannot be imported.
        TypeError: The outside object is no recipe and returns none.
    """
    host, suffix = _parsed(name)
    if not host and (outer := _outside(name)) is not None:
        found = _outside_recipe(outer[0], preset)
        return SUFFIXES[outer[1]](found) if outer[1] else found
    if host and f"{host}{suffix}" not in _own_names():
        raise ValueError(f"{host} has nothing for {suffix!r} to build on; it goes with {' '.join(HOSTS)}")
    if not host:
        near = nearest_names(name.lower(), methods(), most=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown method {name!r}.{hint} Methods: {' '.join(METHODS)}; suffixes: {' '.join(SUFFIXES)}")
    found = preset_values(METHODS[host](), host, preset)
    return SUFFIXES[suffix](found) if suffix else found


def methods(pattern: str = "*") -> list[str]:
    """Names of all methods, those without a suffix first, or those that match a pattern such as `'sar*'`.

    Names that installed packages announce come last.
    """
    own = _own_names()
    names = own + [name for name in outside.announced("method") if name not in own]
    return names if pattern == "*" else [name for name in names if fnmatchcase(name, pattern)]


def _own_names() -> list[str]:
    return [*METHODS, *(f"{host}{suffix}" for host in HOSTS for suffix in SUFFIXES)]


def is_outside_method(name: str) -> bool:
    """Whether a name, with or without a suffix, is of another package; it may still fail to import."""
    return outside_host(name) is not None


def outside_host(name: str) -> str | None:
    """The name that another package has, without a suffix; None for a method of this package and for unknown ones."""
    found = None if _parsed(name)[0] else _outside(name)
    return None if found is None else found[0]


def _outside(name: str) -> tuple[str, str] | None:
    """Outside name and suffix of a method's name, or None."""
    for suffix in ("", *SUFFIXES):
        host = name.removesuffix(suffix)
        if name.endswith(suffix) and outside.is_outside("method", host):
            return host, suffix
    return None


def _outside_recipe(name: str, preset: Preset) -> Recipe:
    """The recipe that an outside name stands for, or that its function returns."""
    made = given = outside.load("method", name)
    if callable(given) and not isinstance(given, Recipe):
        if preset not in get_args(Preset):
            preset_values(tent(), "tent", preset)  # raises with the nearest preset
        try:
            takes = "preset" in inspect.signature(given).parameters
            made = given(preset=preset) if takes else given()
        except Exception as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            raise ValueError(
                f"expected {name} to return a poem.Recipe when it is called without arguments (or with preset alone), "
                f"got {type(error).__name__}: {reason}"
            ) from error
    if not isinstance(made, Recipe):
        kind = made.__name__ if isinstance(made, type) else type(made).__name__
        hint = "return poem.Recipe(...) or dataclasses.replace(poem.recipe('tent'), ...)"
        if isinstance(made, Part) or (isinstance(made, type) and issubclass(made, Part)):
            hint = f"a part goes into a recipe: poem.Recipe(select=...), or --method tent --set changes.select={name}"
        raise TypeError(f"expected {name} to be a poem.Recipe or a function that returns one, got {kind}; {hint}")
    return made


def preset_values(method: Recipe, name: str, preset: Preset) -> Recipe:
    """A method with another data set's published constants: Adam at 0.001 and looser filters on CIFAR.

    `"cifar10"` is another name of `"cifar"`.

    `come`, `zerosiam`, `rpl` and `recap` have no published constants there and take Tent's; `spa`, `rem`,
    `protected` and `petta` keep their own.

    Paper: the configurations of tent, cotta and the online-TTA benchmark of Marsden et al. for CIFAR-10-C and -100-C.
    """
    if preset == "imagenet":
        return method
    if preset not in get_args(Preset):
        near = nearest_names(str(preset), get_args(Preset))
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected preset imagenet, cifar or cifar100, got {preset!r}{hint}")
    if name in KEEP_CONSTANTS:
        return method
    ten = preset != "cifar100"
    cosine = 0.4 if ten or name == "rdumb" else 0.1
    if not method.learns:
        return method
    if name == "memo":
        return replace(method, lr=0.005, views=AugMix(views=32, pre="crop"))
    changed = replace(method, lr=0.001) if name == "sar" else replace(method, lr=0.001, step=Adam())
    if name in ("eta", "eata", "rdumb", "auto"):
        changed = replace(changed, select=EntropyBelow(0.4) & NotRedundant(cosine))
    if name == "auto":  # least is not measured with Adam, which divides by an average of past gradients' sizes
        changed = replace(changed, minimise=Entropy(), branch=AdaptBranch())
    if changed.on_batch_norm is not None:
        other = preset_values(changed.on_batch_norm, name, preset)
        changed = replace(changed, on_batch_norm=other)
    if name == "eata":
        changed = replace(changed, minimise=Entropy() + FisherAnchor(1.0))
    if name == "cotta":
        teacher = MeanTeacher(unsure=0.92 if ten else 0.72)
        follow = FollowTeacher(symmetric=False)
        changed = replace(changed, teacher=teacher, minimise=follow, recover=StochasticRestore(0.01))
    return changed


def describe(name: str) -> str:
    """What a method does, its paper, reference code and differences, as its docstring says."""
    found = recipe(name)
    host, suffix = _parsed(name)
    if not host and (outer := _outside(name)) is not None:
        return _outside_description(*outer, found)
    text = inspect.cleandoc(METHODS[host].__doc__ or "")
    if suffix:
        added = inspect.cleandoc(SUFFIXES[suffix].__doc__ or "")
        text = f"{host} with this on top: {added}\n\n{host}: {text}"
    return text


def _outside_description(host: str, suffix: str, found: Recipe) -> str:
    """The docstring of an outside function, and where it comes from."""
    given = outside.load("method", host)
    text = "" if isinstance(given, Recipe) else inspect.cleandoc(given.__doc__ or "")
    about = outside.announced("method").get(host, outside.path_of("method", host))
    added = f" with this on top: {inspect.cleandoc(SUFFIXES[suffix].__doc__ or '')}" if suffix else ""
    return f"{text or 'A recipe of its own.'}{added}\n\nFrom: {about}"


def _parsed(name: str) -> tuple[str, str]:
    """Host method and suffix of a name, both empty where it is none."""
    if name in METHODS:
        return name, ""
    fits = (ending for ending in SUFFIXES if name.endswith(ending) and name.removesuffix(ending) in METHODS)
    suffix = next(fits, "")
    return (name.removesuffix(suffix), suffix) if suffix else ("", "")
