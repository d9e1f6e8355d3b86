#!/usr/bin/env bash
# Makes all files of a release in build/release-VERSION: the wheel, Debian packages and the archive,
# each tested, with their SHA-256 sums and the release notes from the changelog. Publishes nothing
# and changes nothing else. Prints the next steps, which a person does.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "release: $*" >&2
  exit 1
}

# section HEADING: the text in CHANGELOG.md from the heading that begins so up to the next heading.
section() {
  awk -v heading="## $1" '
    /^## / { inside = index($0, heading) == 1 && substr($0, length(heading) + 1) !~ /^[^ ]/; next }
    inside' CHANGELOG.md
}

version=$(<VERSION)
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "VERSION says '$version', not three numbers with dots"
changed=$(git status --porcelain)
[[ -z $changed ]] || fail "the checkout has changes that no commit has:"$'\n'"$changed"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null ||
  fail "the tag v$version is there already: VERSION needs a new number"
grep -qE "^## $version - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
  fail "CHANGELOG.md has no line '## $version - YYYY-MM-DD': what is in Unreleased belongs below one"
[[ -z $(section Unreleased | tr -d '[:space:]') ]] ||
  fail "CHANGELOG.md has changes in Unreleased, which $version has too: they belong below its line"

make package wheels
scripts/wheels-test.sh

made=build/release-$version
rm -rf "$made"
mkdir -p "$made"
cp build/wheels/*.whl build/package/*.deb build/package/*.tar.gz "$made"
section "$version" >"$made/NOTES.md"
(cd "$made" && sha256sum -- *.whl *.deb *.tar.gz >SHA256SUMS && sha256sum --check --quiet SHA256SUMS)

echo
ls -l "$made"
cat <<EOF

Spillway $version lies in $made; nothing is published. A person does the rest:

  git tag --sign v$version --message "Spillway $version" && git push origin v$version
  attach the files of $made to the release of that tag, with NOTES.md as its text
  sign SHA256SUMS (gpg --detach-sign --armor $made/SHA256SUMS) and attach the signature
  try the wheel where another system is: scripts/wheels-test.sh bundle
  upload the wheel to PyPI as spillway-kv
EOF
