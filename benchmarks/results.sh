#!/usr/bin/env bash
# The tables of docs/results.md, each in a folder of its own below $1; a folder that is there already goes on.
# ZASGD is the command, ZASGD_COMPARE further options (--jobs N). Hours on two cores; one table: pass its letter as $2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:?usage: benchmarks/results.sh FOLDER [a|b|c|d]}"
which="${2:-abcd}"
zasgd="${ZASGD:-zasgd}"
traces=benchmarks/traces

compare() { # folder, then what zasgd compare takes
    local folder="$1"
    shift
    # shellcheck disable=SC2086 # options
    $zasgd compare "$@" --out "$out/$folder" ${ZASGD_COMPARE:-}
}

sgd="sequential,sync,asgd,dc-asgd-c,dc-asgd-a,staleness-aware,delay-adaptive,gap-aware"
momentum="sequential,sync,asgd,dc-asgd-a,staleness-aware,gap-aware,dana,dana-slim,dana-dc,dana+ga"
adamw="algorithm=adamw lr=0.002"
if [[ $which == *a* ]]; then
    for speeds in homogeneous heterogeneous; do
        grid=(--workers 4,8,16,32,64 --seeds 2 --no-curve --speeds "$speeds")
        compare "a_sgd_$speeds" digits --rules "$sgd" "${grid[@]}"
        compare "a_nag_$speeds" digits_nag --rules "$momentum" "${grid[@]}"
    done
    compare a_adamw digits --workers 4,16,64 --seeds 2 --no-curve --rules \
        "sequential[$adamw],asgd[$adamw],dc-asgd-a[$adamw],delay-adaptive[$adamw],asgd[$adamw mode=buffer quorum=8]"
    compare a_local digits --workers 4,8,16,32 --seeds 2 --no-curve --rules \
        "easgd[push_every=5],delta[push_every=5],diloco[push_every=10 lr=0.03]"
    compare a_gate digits --workers 32 --seeds 2 --no-curve --speeds heterogeneous --rules \
        "asgd[max_lag=32],asgd[max_lag=64],asgd[max_lag=32 lag_policy=damp],asgd[max_lag=64 lag_policy=block],asgd"
fi

if [[ $which == *b* ]]; then
    compare b_resnet fashion_resnet8 --rules sequential,sync,asgd,dc-asgd-c,dc-asgd-a --workers 4,8,16,32 --seeds 3 \
        --set train.epochs=12
    compare b_cnn fashion_dana --rules sequential,dana+ga --workers 16 --seeds 1 --no-curve # 15 epochs, 60,000 images
fi

if [[ $which == *c* ]]; then
    compare c_clients digits --rules asgd,dc-asgd-a --workers 1,2,4,8 --seeds 3 --target-loss 0.05
    for kind in "outer_mean=false" "outer_mean=true" "outer_lr=2"; do
        rules=""
        for steps in 1 5 20 50; do rules+="delta[push_every=$steps $kind],"; done
        compare "c_n_sync_${kind//=/_}" digits_nag --rules "${rules%,}" --workers 8 --seeds 2
    done
    compare c_network digits --workers 16 --seeds 2 --no-curve --network 5,0.003 --rules \
        "dc-asgd-a,dc-asgd-a[push_every=5],delta[push_every=5]" # 36 kB each way over two lines of 3 Mbit/s
    for start in warm_start slow_start; do
        compare "c_$start" digits_nag --rules "delta[push_every=5 outer_mean=false],delta[push_every=5],asgd" \
            --workers 1 --churn "$traces/$start.csv" --seeds 2
    done
fi

if [[ $which == *d* ]]; then
    for trace in up_and_down spot; do
        compare "d_$trace" digits_nag --rules "sync,asgd,dc-asgd-a,dana+ga" --workers 16 --churn "$traces/$trace.csv" --seeds 3
    done
fi
