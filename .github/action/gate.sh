#!/usr/bin/env bash
# What action.yml runs: repeat the baseline's experiment, gate it, and comment on the pull request.
#
# BASELINE       run folder in the repository
# CANDIDATE      run folder; empty: EXPERIMENT is run
# EXPERIMENT     experiment file; empty: that of the baseline
# MAX_REGRESSION, METRIC, ALLOW_DIFFERENT (with commas)  as in `slo-bench gate`
# COMMENT        true: comment on PULL_REQUEST of GITHUB_REPOSITORY, with gh and GH_TOKEN
set -euo pipefail
: "${BASELINE:?names the run folder of the baseline}"
work=$(mktemp -d)
table="$work/gate.md"
mark='<!-- slo-bench gate -->'

if [ -z "${CANDIDATE:-}" ]; then
    CANDIDATE="$work/candidate"
    slo-bench run "${EXPERIMENT:-$BASELINE/experiment.toml}" --out "$CANDIDATE"
fi
options=(--max-regression "${MAX_REGRESSION:-5%}" --markdown "$table")
[ -z "${METRIC:-}" ] || options+=(--metric "$METRIC")
IFS=, read -ra different <<< "${ALLOW_DIFFERENT:-}"
for setting in "${different[@]}"; do options+=(--allow-different "$setting"); done
code=0
slo-bench gate "$BASELINE" "$CANDIDATE" "${options[@]}" || code=$?
case $code in
    0) verdict=passed ;;
    1) verdict=failed ;;
    *) verdict='not comparable' ;;
esac
[ -s "$table" ] || printf '### slo-bench gate\n\nNo table: see the log of this job.\n' > "$table"
printf '%s\n' "$mark" | cat - "$table" > "$work/comment.md"
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$table" >> "$GITHUB_STEP_SUMMARY"
[ -z "${GITHUB_OUTPUT:-}" ] || printf 'verdict=%s\ncandidate=%s\n' "$verdict" "$CANDIDATE" >> "$GITHUB_OUTPUT"

# One comment, which later runs change. A token that may not write (a fork's) is no failed gate.
if [ "${COMMENT:-true}" = true ] && [ -n "${PULL_REQUEST:-}" ]; then
    comments="repos/$GITHUB_REPOSITORY/issues/$PULL_REQUEST/comments"
    mine=".[] | select(.body | startswith(\"$mark\")) | .id"
    if id=$(gh api "$comments" --paginate --jq "$mine" | head -n 1); then
        if [ -n "$id" ]; then
            said=(--method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$id")
        else
            said=("$comments")
        fi
        gh api "${said[@]}" --field "body=@$work/comment.md" --silent \
            || echo "::warning::slo-bench: no comment could be written on the pull request"
    else
        echo "::warning::slo-bench: the pull request's comments cannot be read"
    fi
fi
exit "$code"
