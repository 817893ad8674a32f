#!/bin/sh
# Builds build/wheels/PYTHON (what pip needs offline), dist/*.whl and dist/gpusched_VERSION_ARCH.deb: make package. Argument: the pip command, of an environment with setuptools.
#
# The package is a virtual environment with a site-packages for each Python of $PYTHONS (Debian 12 and 13): a virtual
# environment takes that of the interpreter that runs it. So nothing is fetched or built where it is installed, and dpkg
# knows every file. Libraries are those of requirements/base.txt, as wheels, with their hashes.
set -eu
pip=$1 PYTHONS=${PYTHONS:-"3.11 3.13"}
cd "$(dirname "$0")/.."
root=build/package home=usr/lib/gpusched
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' gpusched/__init__.py)
arch=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
date=$(date -R -u -d "@$SOURCE_DATE_EPOCH")
platforms=
for tag in 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
    platforms="$platforms --platform manylinux_${tag}_$(uname -m)"
done

umask 022
rm -rf $root build/lib build/bdist.*
mkdir -p dist $root/$home/bin $root/usr/bin $root/usr/share/doc/gpusched $root/usr/share/lintian/overrides $root/DEBIAN
$pip wheel -q --no-deps --no-build-isolation --wheel-dir $root/wheel .
cp $root/wheel/*.whl dist/

for one in $PYTHONS; do
    packages=$root/$home/lib/python$one/site-packages wheels=build/wheels/$one
    rm -rf $wheels
    # shellcheck disable=SC2086
    $pip download -q --no-deps --require-hashes --only-binary=:all: --implementation cp --python-version "$one" \
        $platforms --platform "manylinux2014_$(uname -m)" --dest $wheels -r requirements/base.txt
    rm -f $wheels/setuptools-*
    cp $root/wheel/*.whl $wheels
    # shellcheck disable=SC2086
    $pip install -q --no-deps --no-compile --no-index --only-binary=:all: --implementation cp --python-version "$one" \
        $platforms --platform "manylinux2014_$(uname -m)" --target $packages $wheels/*.whl
    # Tests of libraries, and their programs, which have the wrong interpreter.
    (cd $packages && rm -rf example.py bin include share &&
        find . -depth -type d \( -name tests -o -name test \) -exec rm -rf {} + &&
        find . -name '*.pyi' -delete && find . -name 'direct_url.json' -delete)
done
rm -rf $root/wheel
hardlink -q -c $root/$home/lib >/dev/null # what is the same for all Pythons is in the package once

printf 'home = /usr/bin\ninclude-system-site-packages = false\n' >$root/$home/pyvenv.cfg
ln -s ../../../bin/python3 $root/$home/bin/python3
printf '#!/%s/bin/python3\nfrom gpusched.__main__ import main\n\nraise SystemExit(main())\n' $home >$root/$home/bin/gpusched
chmod 755 $root/$home/bin/gpusched
ln -s ../lib/gpusched/bin/gpusched $root/usr/bin/gpusched

doc=$root/usr/share/doc/gpusched
cp packaging/debian/copyright $doc/copyright
printf 'gpusched (%s) stable; urgency=medium\n\n  * See CHANGELOG.md of the sources.\n\n -- gpusched <root@localhost>  %s\n' \
    "$version" "$date" | gzip -9n >$doc/changelog.gz
cp packaging/debian/lintian-overrides $root/usr/share/lintian/overrides/gpusched

interpreters=$(for one in $PYTHONS; do printf ' | python%s' "$one"; done)
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" -e "s/@PYTHONS@/${interpreters# | }/" \
    -e "s/@SIZE@/$(du -sk $root/usr | cut -f1)/" packaging/debian/control >$root/DEBIAN/control
for script in postinst prerm postrm; do
    install -m 755 packaging/debian/$script $root/DEBIAN/$script
done
(cd $root && find usr -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
find $root -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz -z1 --build $root "dist/gpusched_${version}_$arch.deb"
ls -l dist/*"$version"*
