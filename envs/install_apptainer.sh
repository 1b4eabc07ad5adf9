#!/usr/bin/env bash
# A machine without a usable Apptainer -> `apptainer` (>= 1.1) on PATH, with the programs it
# calls: squashfs-tools, squashfuse, fuse-overlayfs, uidmap, and mmdebstrap for the image's base.
#
#     bash envs/install_apptainer.sh
#
# Run by `make setup`. This is the only step of the set-up that changes anything outside the
# checkout; every change is announced on a line that begins with "apptainer:". It may be run
# again at any time and then only says what it found.
#
#   on PATH, 1.1 or newer        used as it is
#   packaged by the system       apt-get install apptainer
#   Ubuntu                       the Apptainer project's PPA
#   Debian without the package   Debian sid's package beside a private copy of sid's C library,
#                                repacked into one .deb (`apt-get remove apptainer` undoes it)
#   anything else                a message that names what to install

set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

readonly MINIMUM_VERSION=1.1 # the first release that builds and runs without set-user-id helpers
readonly GLIBC=/usr/lib/apptainer-glibc # where the repacked package keeps sid's C library
# debian-archive-keyring: on Ubuntu, mmdebstrap needs it to check the Debian base of the image.
# tzdata: Apptainer mounts /etc/localtime into every container, and a minimal system has none.
readonly HELPERS=(
    squashfs-tools squashfuse fuse3 fuse2fs fuse-overlayfs uidmap mmdebstrap debian-archive-keyring tzdata
)
readonly SUBORDINATE_IDS=100000-165535

say() { printf 'apptainer: %s\n' "$*"; }

fail() {
    printf 'apptainer: ERROR: %s\n' "$1" >&2
    shift
    (($# == 0)) || printf '    %s\n' "$@" >&2
    exit 1
}

as_root() {
    if ((EUID == 0)); then "$@"; else sudo --preserve-env=DEBIAN_FRONTEND "$@"; fi
}

# Succeeds when version $1 is at least version $2.
at_least() { [[ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" == "$2" ]]; }

# Prints the version of the apptainer on PATH ("apptainer version 1.4.5" -> 1.4.5).
installed_version() { apptainer --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1; }

# Prints the version that apt would install of package $1, or nothing.
candidate() {
    apt-cache policy "$1" 2>/dev/null | sed -nE 's/^ +Candidate: ([^(].*)$/\1/p'
}

install_packages() {
    say "installing packages: $*"
    as_root apt-get install -qq -y --no-install-recommends "$@" >/dev/null ||
        fail "apt-get could not install: $*" "its own message stands above"
}

# Prints one base address a line: where this system already gets Debian itself from.
# apt is asked, so that the format of its source files does not matter.
debian_mirrors() {
    apt-get indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort -u
}

# Debian sid's apptainer needs a newer C library than an older Debian has. It runs beside the
# old one when its two programs are pointed at a private copy; nothing else on the system sees
# that copy. Both go into one package, which apt installs and can remove.
install_from_sid() {
    local work mirror architecture version deb
    local -a apt
    architecture=$(dpkg --print-architecture)
    [[ $architecture == amd64 ]] ||
        fail "the recipe for Debian covers amd64, this system is $architecture" \
            "put apptainer $MINIMUM_VERSION or newer on PATH, then run: make setup"
    install_packages ca-certificates debian-archive-keyring patchelf xz-utils

    work=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder's name is wanted as it is now
    trap "rm -rf '$work'" EXIT
    mkdir -p "$work"/{lists/partial,cache/archives/partial,download}
    apt=(
        -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache"
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root
    )
    deb=
    for mirror in $(debian_mirrors); do
        say "looking for Debian sid's apptainer on the mirror that this system uses ($mirror)"
        printf 'deb [signed-by=%s] %s sid main\n' \
            /usr/share/keyrings/debian-archive-keyring.gpg "$mirror" >"$work/sources.list"
        if as_root apt-get "${apt[@]}" -qq update &&
            (cd "$work/download" && as_root apt-get "${apt[@]}" -qq download apptainer libc6); then
            deb=$(echo "$work"/download/apptainer_*.deb)
            break
        fi
    done
    [[ -n $deb ]] ||
        fail "no configured Debian mirror offers the suite sid with apptainer and libc6" \
            "mirrors asked: $(debian_mirrors | tr '\n' ' ')" \
            "put apptainer $MINIMUM_VERSION or newer on PATH, then run: make setup"

    version="$(dpkg-deb --field "$deb" Version)~aerie2" # sorts below the real one, which may replace it
    say "repacking it as version $version with the C library of" \
        "$(basename "$work"/download/libc6_*.deb) under $GLIBC"
    as_root bash -euo pipefail -c '
        work=$1 glibc=$2 version=$3
        umask 022
        dpkg-deb --raw-extract "$work"/download/apptainer_*.deb "$work/package"
        dpkg-deb --extract "$work"/download/libc6_*.deb "$work/libc6"
        libraries=$glibc/usr/lib/x86_64-linux-gnu
        mkdir -p "$work/package$libraries" "$work/package$glibc/usr/share/doc"
        cp -a "$work/libc6/usr/lib/x86_64-linux-gnu/." "$work/package$libraries/"
        cp -a "$work/libc6/usr/share/doc/libc6" "$work/package$glibc/usr/share/doc/"
        # As an rpath, not a runpath: Apptainer starts itself with LD_LIBRARY_PATH set to the old library.
        for program in usr/bin/apptainer usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
            patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" \
                --force-rpath --set-rpath "$libraries:/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu" \
                "$work/package/$program"
        done
        sed -i -E \
            -e "s/^Version: .*/Version: $version/" \
            -e "s/, libc6 \(>= [^)]*\)//" \
            -e "/^(Static-)?Built-Using: /d" \
            "$work/package/DEBIAN/control"
        (cd "$work/package" && find . -path ./DEBIAN -prune -o -type f -printf "%P\0" |
            sort -z | xargs -0 md5sum >DEBIAN/md5sums)
        dpkg-deb --root-owner-group -Zxz -z1 --build "$work/package" "$work/apptainer.deb" >/dev/null
        chmod -R a+rX "$work"
    ' repack "$work" "$GLIBC" "$version"
    install_packages "$work/apptainer.deb"
}

install_from_ppa() {
    install_packages software-properties-common
    say "adding the package archive ppa:apptainer/ppa to this system's apt sources"
    as_root add-apt-repository -y ppa:apptainer/ppa >/dev/null ||
        fail "add-apt-repository could not add ppa:apptainer/ppa" "its own message stands above"
    install_packages apptainer
}

install_apptainer() {
    local id id_like
    id=$(. /etc/os-release 2>/dev/null && echo "${ID:-}")
    id_like=$(. /etc/os-release 2>/dev/null && echo "${ID_LIKE:-}")
    if [[ " $id $id_like " != *" debian "* && " $id $id_like " != *" ubuntu "* ]]; then
        fail "no apptainer on PATH, and this system (${id:-unknown}) is neither Debian nor Ubuntu" \
            "install version $MINIMUM_VERSION or newer, one of:" \
            "  Fedora, RHEL, Rocky, Alma:  dnf install epel-release && dnf install apptainer" \
            "  conda or mamba:             mamba install -c conda-forge apptainer" \
            "  a cluster:                  module avail apptainer && module load apptainer" \
            "then run: make setup"
    fi
    if ((EUID != 0)) && ! command -v sudo >/dev/null; then
        fail "no apptainer on PATH, and installing it needs root or sudo (this is user $(id -un))" \
            "ask an administrator for apptainer $MINIMUM_VERSION or newer, load a module that has it," \
            "or: mamba install -c conda-forge apptainer" \
            "then run: make setup"
    fi
    say "not on PATH: installing it on this $id system (the only change outside the checkout)"
    say "refreshing apt's package lists"
    as_root apt-get update -qq || say "apt-get update reported the problem above; going on with the lists there are"
    install_packages "${HELPERS[@]}"
    local packaged
    packaged=$(candidate apptainer)
    if [[ -n $packaged ]] && at_least "$packaged" "$MINIMUM_VERSION"; then
        install_packages apptainer
    elif [[ $id == ubuntu || " $id_like " == *" ubuntu "* ]]; then
        install_from_ppa
    else
        install_from_sid
    fi
    hash -r
    command -v apptainer >/dev/null || fail "apptainer was installed but is not on PATH" "PATH is $PATH"
}

# Root without some capability (virtual machines and containers that withhold CAP_SYS_RESOURCE or
# others) builds in a user namespace, and that namespace needs subordinate ids for root.
grant_subordinate_ids() {
    local bounding last
    ((EUID == 0)) || return 0
    bounding=$(sed -nE 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
    last=$(</proc/sys/kernel/cap_last_cap)
    ((0x$bounding == (1 << (last + 1)) - 1)) && return 0
    if grep -qE '^(root|0):' /etc/subuid 2>/dev/null && grep -qE '^(root|0):' /etc/subgid 2>/dev/null; then
        return 0
    fi
    say "this machine withholds capabilities from root: giving root the subordinate ids" \
        "$SUBORDINATE_IDS in /etc/subuid and /etc/subgid"
    usermod --add-subuids "$SUBORDINATE_IDS" --add-subgids "$SUBORDINATE_IDS" root
}

main() {
    local version
    command -v apptainer >/dev/null || install_apptainer
    version=$(installed_version) || true
    [[ -n $version ]] ||
        fail "$(command -v apptainer) does not run:" "$(apptainer --version 2>&1 | head -n 3)"
    at_least "$version" "$MINIMUM_VERSION" ||
        fail "$(command -v apptainer) is version $version, this workflow needs $MINIMUM_VERSION or newer" \
            "put a newer one first on PATH (module load, conda-forge, distribution package), then run: make setup"
    grant_subordinate_ids
    say "using $(command -v apptainer), version $version"
}

main "$@"
